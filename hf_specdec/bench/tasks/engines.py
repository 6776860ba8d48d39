"""The task `engines`: transformers' settings against ours on each engine and batch size, in one interleaved run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product

from tqdm import tqdm

from hf_specdec.bench.figures import bandwidth
from hf_specdec.bench.inputs.prompts import Prompt, benchmark_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.engine_methods import LONGEST_AUTO, LOOKAHEADS, contestants, runs_at
from hf_specdec.bench.running.engine_passes import RECORDED, Forwards, keeping_engines
from hf_specdec.bench.running.methods import Method, assisted_refusal
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_batch import run_batch
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.journal import Record
from hf_specdec.bench.storage.run_session import Key, RunSession, finish, without_kind
from hf_specdec.bench.tasks.collecting import rounded

PROMPTS_PER_LENGTH = 8
# Widths of verification that are timed; those between them are interpolated.
_WIDTHS = (1, 2, 3, 5, 7, 9, 13, LONGEST_AUTO + 1)

Batch = tuple[Prompt, ...]
Place = tuple[str, int, int]  # method or engine, batch size, prompt length
Work = tuple[int, Batch, list[Method]]


def run_engines(settings: Settings) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the markdown.

    A run that was killed goes on where it stopped. Raises `BenchError` for what the user can put right.
    """
    results.check_writable(settings.output_dir)
    pair = load_pair(settings)
    count = max(settings.limit or PROMPTS_PER_LENGTH, *settings.batch_sizes)
    # Room for the drafts beyond the last token, too.
    prompts = benchmark_prompts(pair, settings.prompt_lengths, count, settings.max_new_tokens, spare=LONGEST_AUTO)
    methods = contestants(settings, pair)
    result = results.new(settings, pair, methods, prompts)
    sitting = RunSession(settings, Processes(), key_of)
    with keeping_engines(len(methods)):
        measure(settings, pair, methods, batches(prompts, settings), sitting)
    for key, kind in (("runs", "run"), ("forwards", "forwards"), ("first_calls", "first_call")):
        result[key] = [without_kind(record) for record in sitting.done.values() if record["kind"] == kind]
    result["memory"] = bandwidth.describe(pair, settings.prompt_lengths[0] + settings.max_new_tokens // 2)
    if refusal := assisted_refusal(settings, pair):
        result["notes"].append(refusal)
    sitting.conclude(result)
    finish(result, settings)
    sys.stdout.write(rendering.render(result))


def batches(prompts: Sequence[Prompt], settings: Settings) -> list[list[Batch]]:
    """The prompts of each length and batch size, in groups: about as many rows at every size, one group at least."""
    found = []
    for length in settings.prompt_lengths:
        same = [prompt for prompt in prompts if len(prompt.token_ids) == length]
        for size in settings.batch_sizes:
            count = max(1, (settings.limit or PROMPTS_PER_LENGTH) // size)
            found.append([tuple(same[number * size : (number + 1) * size]) for number in range(count)])
    return found


def measure(
    settings: Settings,
    pair: LoadedPair,
    methods: Sequence[Method],
    groups: Sequence[Sequence[Batch]],
    sitting: RunSession,
) -> None:
    """Everything that the journal does not hold yet, each record written before the next is measured."""
    forwards = Forwards(pair, settings, _widths(settings))
    warm: set[Place] = set()
    work = list(_order(methods, groups, settings.repeats))
    bar = tqdm(total=sum(len(turn) for *_, turn in work), desc="engines", unit="run", file=sys.stderr)
    position = 0
    for repeat, group, turn in work:
        size, length = len(group), len(group[0].token_ids)
        about = {"batch": size, "length": length, "group": group[0].index, "repeat": repeat}
        for method in turn:
            if key_of({"kind": "run", **about, "method": method.name}) not in sitting.done:
                if (method.name, size, length) not in warm:
                    warm.add((method.name, size, length))
                    _warm_up(pair, method, group, settings, sitting)
                run = run_batch(pair, method, group, settings, repeat=repeat, position=position)
                sitting.keep({"kind": "run", **rounded(vars(run))})
            position += 1
            bar.update()
        # After the last method of each group, so that raw forwards meet the same state of the machine as runs do.
        for engine in dict.fromkeys(("eager", RECORDED, *settings.engines)):
            record = {"kind": "forwards", **about, "engine": engine}
            if key_of(record) not in sitting.done and (times := forwards.sample(engine, group)) is not None:
                sitting.keep(record | {"times": rounded(times)})
    bar.close()


def _order(methods: Sequence[Method], groups: Sequence[Sequence[Batch]], repeats: int) -> Iterator[Work]:
    """(repeat, batch, its methods): they take turns on each batch, and the one that begins changes.

    All repeats of one length and batch size come before the next: only they are compared, and what an engine has
    compiled for them need not be kept for long.
    """
    for same in groups:
        for repeat, (number, group) in product(range(repeats), enumerate(same)):
            here = [method for method in methods if runs_at(method, len(group))]
            shift = (repeat + number) % len(here)
            yield repeat, group, [*here[shift:], *here[:shift]]


def _warm_up(pair: LoadedPair, method: Method, group: Batch, settings: Settings, sitting: RunSession) -> None:
    """Two calls that don't count: the first may compile or capture, and its time is kept; the second tries all again.

    As the first use of the models it is also where they refuse what they can't do: `BenchError`, in one line.
    """
    start = time.perf_counter()
    try:
        run_batch(pair, method, group, settings)
    except ValueError as error:
        raise BenchError(" ".join(str(error).split())) from error
    seconds = rounded(time.perf_counter() - start)
    about = {"method": method.name, "batch": len(group), "length": len(group[0].token_ids)}
    if key_of({"kind": "first_call", **about}) not in sitting.done:
        sitting.keep({"kind": "first_call", **about, "seconds": seconds})
    run_batch(pair, method, group, settings)


def _widths(settings: Settings) -> list[int]:
    return sorted({*_WIDTHS, *(tokens + 1 for tokens in settings.lookaheads or LOOKAHEADS)})


def key_of(record: Record) -> Key:
    """What a record is about, for `RunSession`: there is one of each."""
    names = ("kind", "method", "engine", "batch", "length", "group", "repeat")
    return tuple(record.get(name) for name in names)
