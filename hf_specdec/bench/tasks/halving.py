"""Successive halving within a given time: after each stage, the slower half drops out.

The algorithm of Karnin et al. 2013 (Almost Optimal Exploration in Multi-Armed Bandits), with time as its budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_specdec.bench.figures.bootstrap import Ratio
from hf_specdec.bench.running.turns import turn

# Examples below which an interval is no reason to leave a candidate behind.
ENOUGH_EXAMPLES = 10
# Examples of a stage, where half of the time that is left allows for them.
LEAST_EXAMPLES = 2


@dataclass(frozen=True)
class Stage:
    """One stage of a race.

    Args:
        entered: the candidates.
        kept: those that go on; after the last stage its ranking. The fastest first.
        examples: how many had been begun by the end.
        ratios: each candidate's speed over the baseline's; those without a measurement are missing.
    """

    entered: tuple[str, ...]
    kept: tuple[str, ...]
    examples: int
    ratios: Mapping[str, Ratio]


def successive_halving(
    candidates: Sequence[str],
    baseline: str,
    measure: Callable[[str, int], None],
    ratio: Callable[[str, str], Ratio | None],
    *,
    seconds: float,
    group: Callable[[str], str] = lambda name: "",
    first: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Stage]:
    """Finds the fastest candidate by measuring all on the same examples, fewer and fewer candidates on more examples.

    Each stage has an equal share of the time that is left. A candidate goes on if it is among the faster half and,
    once there are `ENOUGH_EXAMPLES`, its interval against the fastest one does not lie below 1.

    Args:
        candidates: names, the most promising first: those at the end are not tried if the time is too short for all.
        baseline: the name of what every ratio is over; it is measured on every example, but is no candidate.
        measure: `measure(name, example)` measures once; examples are counted from `first`.
        ratio: `ratio(a, b)` is the speed of a over that of b, over the examples that both were measured on.
        seconds: for everything; one measurement that has begun is always finished.
        group: the fastest of every group goes on, however slow.
        clock: in seconds.

    Returns:
        The stages in order; the last one's `kept` is its ranking. Empty without candidates.
    """
    end = clock() + seconds
    alive, example, stages = list(candidates), first, list[Stage]()
    groups = len({group(name) for name in alive})
    while alive:
        left = max(1, math.ceil(math.log2(len(alive) / groups)))
        example = _measure_all(alive, baseline, measure, example, clock, clock() + (end - clock()) / left, end)
        ratios = {name: found for name in alive if (found := ratio(name, baseline)) is not None}
        ranking = sorted(ratios, key=lambda name: -ratios[name].value)
        last = left == 1 or clock() >= end
        kept = ranking if last else _kept(ranking, ratio, group, sure=example - first >= ENOUGH_EXAMPLES)
        stages.append(Stage(tuple(alive), tuple(kept), example - first, ratios))
        if last or len(kept) <= 1:
            break
        alive = kept
    return stages


def _kept(
    ranking: Sequence[str], ratio: Callable[[str, str], Ratio | None], group: Callable[[str], str], *, sure: bool
) -> list[str]:
    """The faster half without those that are surely slower than the fastest, and the fastest of every group."""
    firsts = {group(name): name for name in reversed(ranking)}.values()
    kept = []
    for place, name in enumerate(ranking):
        against = ratio(name, ranking[0]) if sure and place > 0 else None
        slower = against is not None and against.slower
        if name in firsts or (place < math.ceil(len(ranking) / 2) and not slower):
            kept.append(name)
    return kept


def _measure_all(
    alive: Sequence[str],
    baseline: str,
    measure: Callable[[str, int], None],
    example: int,
    clock: Callable[[], float],
    stop: float,
    end: float,
) -> int:
    """Example after example until the stage's time would be exceeded; returns the number of the next example.

    The first `LEAST_EXAMPLES` may take half of all the time that is left: one example says little.
    """
    latest = max(stop, (clock() + end) / 2)
    names, began = [baseline, *alive], example
    while True:
        start, done = clock(), example - began
        limit = latest if done < LEAST_EXAMPLES else stop
        # First in the given order, the most promising first: time may end within it.
        for name in turn(names, done) if done else names:
            measure(name, example)
            if clock() >= limit:
                return example + 1
        example += 1
        if 2 * clock() - start > (latest if done + 1 < LEAST_EXAMPLES else stop):
            return example


def overall_ranking(stages: Sequence[Stage]) -> list[str]:
    """All measured candidates: those of the last stage first, then those that dropped out, the latest first."""
    found: dict[str, None] = {}
    for stage in reversed(stages):
        found |= dict.fromkeys(stage.kept)
        found |= dict.fromkeys(sorted(stage.ratios, key=lambda name: -stage.ratios[name].value))
    return list(found)
