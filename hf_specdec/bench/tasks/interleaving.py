"""Methods in turn on batches of prompts of one length, and bare passes between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from tqdm import tqdm

from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.bare_passes import BarePasses, keeping_engines, widths_for
from hf_specdec.bench.running.methods import Method
from hf_specdec.bench.running.methods_by_task import engines_of
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.turns import turn, turn_number
from hf_specdec.bench.running.warming import warm_call, warm_up
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.run_session import RunSession, passes_key

Batch = tuple[Prompt, ...]
PLAIN = ("plain", "none")  # kinds of methods that decode without a draft


def batches_of(prompts: Sequence[Prompt], settings: Settings, most: int) -> list[list[Batch]]:
    """The prompts of each length and batch size in batches.

    Args:
        most: about as many rows at every batch size; one batch at least.
    """
    found = []
    for length in settings.prompt_lengths:
        same = [prompt for prompt in prompts if len(prompt.token_ids) == length]
        for size in settings.batch_sizes:
            count = max(1, min(most, len(same)) // size)
            found.append([tuple(same[number * size : (number + 1) * size]) for number in range(count)])
    return found


def measured(
    settings: Settings,
    pair: LoadedPair,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Batch]],
    others: Sequence[LoadedPair] = (),
    *,
    read_rate: Callable[[], float] | None = None,
) -> dict[str, Any]:
    """All calls and bare passes, as the dict that the JSON will hold; what the journal holds is not run again.

    Args:
        prompts: all that the groups hold.
        groups: of batches that a method needs to be warmed up for only once.
        others: the same target with further drafts of the methods, whose bare passes are timed, too.
        read_rate: measures how fast memory is read, bytes per second; called after each plain call of one row.
    """
    result = results.new(settings, pair, methods, prompts)
    session = RunSession(settings, Processes())
    _measure(settings, [pair, *others], methods, groups, session, read_rate)
    session.conclude(result)
    return result


def _measure(
    settings: Settings,
    pairs: Sequence[LoadedPair],
    methods: Sequence[Method],
    groups: Sequence[Sequence[Batch]],
    session: RunSession,
    read_rate: Callable[[], float] | None,
) -> None:
    """Everything that the journal does not hold yet, each record written before the next is measured."""
    pair, bare = pairs[0], [BarePasses(one, settings.max_new_tokens, widths_for(methods)) for one in pairs]
    warm: set[int] = set()  # groups
    work = list(in_turn(methods, groups, settings.repeats))
    bar = tqdm(total=sum(len(order) for *_, order in work), desc=settings.task, unit="run", file=sys.stderr)
    position = 0
    with bar, keeping_engines(len(methods), pair.target.device):
        for group, repeat, batch, order in work:
            indexes = tuple(prompt.index for prompt in batch)
            size, length = len(batch), len(batch[0].token_ids)
            if group not in warm:
                warm.add(group)
                # As they are listed: what methods of an engine share is prepared by the first of them.
                for method in methods:
                    if method.takes(size) and _lacks(session, method, groups[group], settings.repeats):
                        session.keep_cold(warm_up(pair, method, batch, settings))
            for method in order:
                if not session.has_call(method.name, indexes, repeat):
                    call = warm_call(pair, method, batch, settings, repeat=repeat, position=position)
                    if read_rate is not None and size == 1 and method.kind in PLAIN:
                        about = {"method": method.name, "prompts": list(indexes), "repeat": repeat}
                        session.keep("readings", about | {"bytes_per_second": read_rate()})
                    session.keep_call(call)
                position += 1
                bar.update()
            # After the last method of each batch, so that bare passes meet the same state of the machine as calls do.
            for engine, passes in product(engines_of(order), bare):
                draft = passes.pair.draft_name
                if passes_key(engine, draft, indexes, repeat) in session.records:
                    continue
                times = passes.sample(engine, batch)
                about = {"engine": engine, "draft": draft, "prompts": list(indexes), "repeat": repeat}
                about |= {"batch": size, "length": length}
                # Without times where the engine could not be had and rounds ran as on the eager one.
                session.keep("passes", about | {"times": times or {"draft": {}, "target": {}}})


def _lacks(session: RunSession, method: Method, group: Sequence[Batch], repeats: int) -> bool:
    """Whether any call of a method on a group's batches has not been measured yet."""
    places = product((tuple(prompt.index for prompt in batch) for batch in group), range(repeats))
    return not all(session.has_call(method.name, indexes, repeat) for indexes, repeat in places)


def in_turn(
    methods: Sequence[Method], groups: Sequence[Sequence[Batch]], repeats: int
) -> Iterator[tuple[int, int, Batch, list[Method]]]:
    """(group, repeat, batch, its methods): they take turns on each batch, each time in another order, see `turn`.

    So drift of the machine hits all alike, and so does what the method before leaves in the processor's caches. All
    repeats of one length and batch size come before the next: only they are compared, and what an engine has compiled
    for them need not be kept for long. Turns go on from one length to the next: figures pool the lengths.
    """
    begun: dict[int, int] = {}  # turns by batch size
    for group, same in enumerate(groups):
        size = len(same[0])
        here = [method for method in methods if method.takes(size)]
        before = begun.get(size, 0)
        for repeat, (place, batch) in product(range(repeats), enumerate(same)):
            yield group, repeat, batch, turn(here, before + turn_number(repeat, place, len(same), len(here)))
        begun[size] = before + repeats * len(same)
