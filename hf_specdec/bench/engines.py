"""The task `engines`: transformers' settings against ours on each engine and batch size, in one interleaved run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from hf_specdec.bench import bandwidth, engines_report, environment, results
from hf_specdec.bench.collect import rounded
from hf_specdec.bench.data import Prompt, benchmark_prompts
from hf_specdec.bench.engine_methods import LONGEST_AUTO, LOOKAHEADS, contestants, runs_at
from hf_specdec.bench.engine_runs import BatchForwards, run_batch
from hf_specdec.bench.journal import Journal, Record, discard
from hf_specdec.bench.loading import LoadedPair, load_pair
from hf_specdec.bench.methods import Method, assisted_refusal
from hf_specdec.bench.settings import BenchError, Settings

PROMPTS_PER_LENGTH = 8
# Widths of verification that are timed; those between them are interpolated.
_WIDTHS = (1, 2, 3, 5, 7, 9, 13, LONGEST_AUTO + 1)

Batch = tuple[Prompt, ...]
Work = tuple[int, Batch, list[Method]]


def run_engines(settings: Settings) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the markdown.

    A run that was killed goes on where it stopped. Raises `BenchError` for what the user can put right.
    """
    results.check_writable(settings.output_dir)
    kept = settings.to_dict()
    del kept["output_dir"]
    journal = Journal(settings.output_dir, results.stem(settings), kept)
    pair = load_pair(settings)
    count = max(settings.limit or PROMPTS_PER_LENGTH, *settings.batch_sizes)
    new_tokens = settings.max_new_tokens + LONGEST_AUTO
    prompts = benchmark_prompts(pair, settings.prompt_lengths, count, new_tokens, long_answers=False)
    journal.begin(environment=environment.describe())
    methods = contestants(settings, pair)
    result = results.new(settings, pair, methods, prompts)
    measure(settings, pair, methods, batches(prompts, settings), journal)
    journal.close()
    kinds = {kind: [r for r in journal.records if r["kind"] == kind] for kind in ("run", "forwards", "first_call")}
    result["runs"] = [{key: value for key, value in record.items() if key != "kind"} for record in kinds["run"]]
    result["forwards"], result["first_calls"] = kinds["forwards"], kinds["first_call"]
    result["memory"] = bandwidth.describe(pair, settings.prompt_lengths[0] + settings.max_new_tokens // 2)
    result["environment"]["load_average_at_end"] = environment.load_average()
    if refusal := assisted_refusal(settings, pair):
        result["notes"].append(refusal)
    results.save(result, settings)
    discard(settings.output_dir, results.stem(settings))
    sys.stdout.write(engines_report.render(result))


def batches(prompts: Sequence[Prompt], settings: Settings) -> list[Batch]:
    """The prompts of each length in groups of each batch size: about as many rows at every size, one group at least."""
    found = []
    for length in settings.prompt_lengths:
        same = [prompt for prompt in prompts if len(prompt.token_ids) == length]
        for size in settings.batch_sizes:
            groups = max(1, (settings.limit or PROMPTS_PER_LENGTH) // size)
            found += [tuple(same[number * size : (number + 1) * size]) for number in range(groups)]
    return found


def measure(
    settings: Settings, pair: LoadedPair, methods: Sequence[Method], groups: Sequence[Batch], journal: Journal
) -> None:
    """Everything that the journal does not hold yet, each record written before the next is measured."""
    done = {_key(record) for record in journal.records}
    forwards: dict[tuple[str, int, int], BatchForwards] = {}
    work = list(_order(methods, groups, settings.repeats))
    bar = tqdm(total=sum(len(turn) for *_, turn in work), desc="engines", unit="run", file=sys.stderr)
    warm: set[tuple[str, int, int]] = set()
    position = 0
    for repeat, group, turn in work:
        size, length = len(group), len(group[0].token_ids)
        for method in turn:
            if ("run", method.name, size, group[0].index, repeat) not in done:
                if (method.name, size, length) not in warm:
                    warm.add((method.name, size, length))
                    _warm_up(pair, method, group, settings, journal)
                run = run_batch(pair, method, group, settings, repeat=repeat, position=position)
                journal.append({"kind": "run", **rounded(vars(run))})
            position += 1
            bar.update()
        # After the last method of each group, so that raw forwards meet the same state of the machine as runs do.
        for engine in dict.fromkeys(["eager", *settings.engines]):
            key = ("forwards", engine, size, group[0].index, repeat)
            if key in done:
                continue
            place = (engine, size, length)
            if place not in forwards:
                forwards[place] = BatchForwards(pair, group, settings, engine, _widths(settings))
            described = {"engine": engine, "batch": size, "group": group[0].index, "repeat": repeat}
            journal.append({"kind": "forwards", **described, "times": rounded(forwards[place].sample())})
    bar.close()


def _order(methods: Sequence[Method], groups: Sequence[Batch], repeats: int) -> Iterator[Work]:
    """(repeat, batch, its methods): they take turns on each batch, and the one that begins changes."""
    for repeat in range(repeats):
        for number, group in enumerate(groups):
            here = [method for method in methods if runs_at(method, len(group))]
            shift = (repeat + number) % len(here)
            yield repeat, group, [*here[shift:], *here[:shift]]


def _warm_up(pair: LoadedPair, method: Method, group: Batch, settings: Settings, journal: Journal) -> None:
    """Two calls that don't count: the first may compile or capture, and its time is kept; the second tries all again.

    As the first use of the models it is also where they refuse what they can't do: `BenchError`, in one line.
    """
    start = time.perf_counter()
    try:
        run_batch(pair, method, group, settings)
    except ValueError as error:
        raise BenchError(" ".join(str(error).split())) from error
    seconds = time.perf_counter() - start
    described = {"method": method.name, "batch": len(group), "length": len(group[0].token_ids)}
    journal.append({"kind": "first_call", **described, "seconds": rounded(seconds)})
    run_batch(pair, method, group, settings)


def _widths(settings: Settings) -> list[int]:
    return sorted({*_WIDTHS, *(tokens + 1 for tokens in settings.lookaheads or LOOKAHEADS)})


def _key(record: Record) -> tuple[Any, ...]:
    """What a record is about: there is one of each; first calls are made anew by each start."""
    if record["kind"] == "first_call":
        return ("first_call", record["method"], record["batch"], record["length"])
    what = record["method"] if record["kind"] == "run" else record["engine"]
    return record["kind"], what, record["batch"], record["group"], record["repeat"]
