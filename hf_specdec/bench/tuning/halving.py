"""Successive halving within a given time: after each stage, the slower half drops out.

The algorithm of Karnin et al. 2013 (Almost Optimal Exploration in Multi-Armed Bandits), with time as its budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

from hf_specdec.bench.figures.bootstrap import ENOUGH
from hf_specdec.bench.records import Interval, Stage
from hf_specdec.bench.running.turns import turn


def successive_halving(
    candidates: Sequence[str],
    baseline: str,
    measure: Callable[[str, int], None],
    ratio: Callable[[str, str], Interval | None],
    *,
    seconds: float,
    group: Callable[[str], str] = lambda name: "",
    clock: Callable[[], float] = time.perf_counter,
) -> list[Stage]:
    """Finds the fastest candidate by measuring all on the same examples, fewer and fewer candidates on more examples.

    No candidate drops out for its speed before `ENOUGH` examples. Where the time is too short for so many of all, fewer
    candidates are tried, and where it is too short even so, the race ends with what it has.

    Each stage has an equal share of the time that is left. A candidate goes on if it is among the faster half and its
    interval against the fastest one does not lie below 1.

    Args:
        candidates: names, the most promising first: those at the end are not tried if the time is too short for all.
        baseline: the name of what every ratio is over; it is measured on every example, but is no candidate.
        measure: `measure(name, example)` measures once; examples are counted from 0.
        ratio: `ratio(a, b)` is the speed of a over that of b, over the examples that both were measured on. Its
            interval has to hold for few examples.
        seconds: for everything; one measurement that has begun is always finished.
        group: the fastest of every group goes on, however slow.
        clock: in seconds.

    Returns:
        The stages in order; the last one's `kept` is its ranking. Empty without candidates.
    """
    began = clock()
    end = began + seconds
    alive, example = _begin(candidates, baseline, measure, clock, end) if candidates else ([], 0)
    entered, stages = tuple(candidates), list[Stage]()
    groups = len({group(name) for name in alive})
    while alive:
        left = max(1, math.ceil(math.log2(len(alive) / groups)))
        enough = example >= ENOUGH
        if enough:
            stop = began + (end - began) / left
            example = _measure_all([baseline, *alive], measure, example, clock, stop)
        ratios = {name: found for name in alive if (found := ratio(name, baseline)) is not None}
        # After the others, what time has left with fewer examples.
        ranking = sorted(ratios, key=lambda name: (ratios[name].low is None, -ratios[name].value))
        last = not enough or left == 1 or clock() >= end
        kept = ranking if last else _kept(ranking, ratio, group)
        stages.append(Stage(entered, tuple(kept), example, ratios))
        if last or len(kept) <= 1:
            break
        began, alive, entered = clock(), kept, tuple(kept)
    return stages


def _kept(
    ranking: Sequence[str], ratio: Callable[[str, str], Interval | None], group: Callable[[str], str]
) -> list[str]:
    """The faster half without those that are surely slower than the fastest, and the fastest of every group."""
    firsts = {group(name): name for name in reversed(ranking)}.values()
    half = ranking[: math.ceil(len(ranking) / 2)]
    slower = {name for name in half[1:] if (against := ratio(name, ranking[0])) is not None and against.slower}
    return [name for name in ranking if name in firsts or (name in half and name not in slower)]


def _begin(
    candidates: Sequence[str],
    baseline: str,
    measure: Callable[[str, int], None],
    clock: Callable[[], float],
    end: float,
) -> tuple[list[str], int]:
    """Measures the baseline and candidates on the first `ENOUGH` examples, as many candidates as the time allows.

    Returns:
        The candidates that were measured on all of them, and the number of the next example. Those for which there was
        no time are the last ones, not the slowest.
    """
    names, took = [baseline, *candidates], dict[str, float]()
    for number in range(ENOUGH):
        # One share more than there are examples: with the first ones come calls that warm up.
        shares = ENOUGH - number if number > 0 else ENOUGH + 1
        room = (end - clock()) / shares
        fit = sum(seconds <= room for seconds in accumulate(took[name] for name in names)) if took else len(names)
        names = names[: max(2, fit)]
        # Two examples in the given order, since the second may take longer than the first has shown.
        limited, limit, measured = number < 2, clock() + room, list[str]()
        for name in names if limited else turn(names, number):
            start = clock()
            if start >= end or (limited and len(measured) > 1 and start >= limit):
                break
            measure(name, number)
            took[name] = clock() - start
            measured.append(name)
        if clock() >= end:
            return [name for name in names if name in took][1:], number + 1
        names = measured if limited else names
    return names[1:], ENOUGH


def _measure_all(
    names: Sequence[str], measure: Callable[[str, int], None], example: int, clock: Callable[[], float], stop: float
) -> int:
    """Example after example until the time would be exceeded; returns the number of the next example."""
    took = 0.0
    while (start := clock()) + took < stop:
        for name in turn(names, example):
            measure(name, example)
            if clock() >= stop:
                return example + 1
        example, took = example + 1, clock() - start
    return example


def overall_ranking(stages: Sequence[Stage]) -> list[str]:
    """All measured candidates: those of the last stage first, then those that dropped out, the latest first."""
    found: dict[str, None] = {}
    for stage in reversed(stages):
        found |= dict.fromkeys(stage.kept)
        found |= dict.fromkeys(sorted(stage.ratios, key=lambda name: -stage.ratios[name].value))
    return list(found)
