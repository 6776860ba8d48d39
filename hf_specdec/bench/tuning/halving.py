"""Successive halving within a given time: after each stage, the slower half drops out.

The algorithm of Karnin et al. 2013 (Almost Optimal Exploration in Multi-Armed Bandits), with time as its budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from hf_specdec.bench.figures.bootstrap import ENOUGH
from hf_specdec.bench.records import Interval
from hf_specdec.bench.running.turns import turn

# `measure(name, example)` times one call.
Measure = Callable[[str, int], None]
# `ratio(a, b)`: the speed of a over that of b, on the examples measured for both.
Ratio = Callable[[str, str], Interval | None]


def successive_halving(
    candidates: Sequence[str],
    baseline: str,
    measure: Measure,
    ratio: Ratio,
    *,
    seconds: float,
    group: Callable[[str], Any] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[str]]:
    """Find the fastest candidate: all run on the same examples, fewer and fewer candidates on more and more examples.

    No candidate drops out for its speed before `ENOUGH` examples. If there is not enough time for that, fewer
    candidates are tried; if there is still not enough, the race ends with what it has.

    Each stage gets an equal share of the remaining time. A candidate goes on if it is among the faster half and its
    interval against the fastest one does not lie below 1.

    Args:
        candidates: names, the most promising first: the last ones are not tried if the time is too short for all.
        baseline: the denominator of the ratios; measured on every example, but no candidate.
        measure: called with examples counted from 0.
        ratio: its interval must be valid for few examples.
        seconds: total time; a measurement that has begun is always finished.
        group: the fastest candidate of every group goes on, however slow.
        clock: in seconds.

    Returns:
        The ranking of the measured candidates at the end of each stage, the fastest first, those without an interval
        last. The last one is the result.
    """
    began = clock()
    end = began + seconds
    alive, example = _begin([baseline, *candidates], measure, clock, end) if candidates else ([], 0)
    rankings: list[list[str]] = []
    groups = len({group(name) for name in alive})
    while alive:
        left = max(1, math.ceil(math.log2(len(alive) / groups)))
        example = _measure_all([baseline, *alive], measure, example, clock, began + (end - began) / left)
        found = {name: one for name in alive if (one := ratio(name, baseline)) is not None}
        rankings.append(sorted(found, key=lambda name: (found[name].low is None, -found[name].value)))
        kept = _kept(rankings[-1], ratio, group)
        if left == 1 or clock() >= end or len(kept) <= 1:
            break
        began, alive = clock(), kept
    return rankings


def _kept(ranking: Sequence[str], ratio: Ratio, group: Callable[[str], Any]) -> list[str]:
    """The faster half, except those surely slower than the fastest, plus the fastest of every group."""
    firsts = {group(name): name for name in reversed(ranking)}.values()
    half = ranking[: math.ceil(len(ranking) / 2)]
    slower = {name for name in half[1:] if (against := ratio(name, ranking[0])) is not None and against.slower}
    return [name for name in ranking if name in firsts or (name in half and name not in slower)]


def _begin(names: list[str], measure: Measure, clock: Callable[[], float], end: float) -> tuple[list[str], int]:
    """Measure the baseline and as many candidates as time allows on the first `ENOUGH` examples.

    Returns:
        The candidates measured on all of these examples, and the number of the next example. Candidates are dropped
        from the end of the list, not by speed.
    """
    for example in range(ENOUGH):
        # One more share than examples: the first calls are preceded by warm-up calls.
        limit = clock() + (end - clock()) / (ENOUGH - example + (example == 0))
        done: list[str] = []
        for name in names:
            # The baseline and one candidate are always measured while there is time.
            if clock() >= (limit if len(done) > 1 else end):
                break
            measure(name, example)
            done.append(name)
        over = clock() >= end
        # After a cut, candidates still have figures of the examples before, except after the first example.
        names = done if not over or example in (0, ENOUGH - 1) else names
        if over:
            return names[1:], example + 1
    return names[1:], ENOUGH


def _measure_all(names: Sequence[str], measure: Measure, example: int, clock: Callable[[], float], stop: float) -> int:
    """Measure example after example until the next would exceed the time; return the number of the next example."""
    took = 0.0
    while (start := clock()) + took < stop:
        for name in turn(names, example):
            measure(name, example)
            if clock() >= stop:
                return example + 1
        example, took = example + 1, clock() - start
    return example
