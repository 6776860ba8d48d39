"""Successive halving on a simulated machine: it finds the fastest candidate, keeps to its time, and can fail."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from hf_specdec.bench.figures.bootstrap import ENOUGH, interval
from hf_specdec.bench.records import Interval, Stage
from hf_specdec.bench.tuning import halving
from hf_specdec.bench.tuning.halving import overall_ranking, successive_halving

SECONDS = 300.0
# True speeds over the baseline's: one is best, with some within 5% of it and many behind.
SPEEDS = {"plain": 1.0} | {f"c{number}": 2.0 - 0.04 * number for number in range(32)}
RACERS = [name for name in SPEEDS if name != "plain"]


class Machine:
    """Examples of uneven length that all candidates share, noise on each measurement, and a clock that runs."""

    def __init__(
        self,
        seed: int,
        noise: float = 0.15,
        speeds: dict[str, float] = SPEEDS,
        factor: Callable[[str, int], float] = lambda name, example: 1.0,
    ) -> None:
        self.now, self.noise, self.speeds, self.factor = 0.0, noise, speeds, factor
        self.draws = random.Random(seed)
        self.took: dict[str, dict[int, float]] = {name: {} for name in speeds}
        order = RACERS.copy()
        random.Random(-seed).shuffle(order)
        self.order = order

    def measure(self, name: str, example: int) -> None:
        length = random.Random(1000 + example).uniform(0.1, 0.4)
        seconds = length / self.speeds[name] * self.draws.lognormvariate(0, self.noise)
        seconds *= self.factor(name, example)
        self.took[name][example] = seconds
        self.now += seconds

    def ratio(self, ours: str, base: str) -> Interval | None:
        both = sorted(self.took[ours].keys() & self.took[base].keys())
        cells = [[(self.took[base][example], self.took[ours][example])] for example in both]
        return interval(cells, lambda theirs, mine: theirs / mine)

    def race(self, seconds: float = SECONDS, group: Callable[[str], str] = lambda name: "") -> list[Stage]:
        return successive_halving(
            self.order, "plain", self.measure, self.ratio, seconds=seconds, group=group, clock=lambda: self.now
        )


def loss(stages: list[Stage]) -> float:
    """By how much the winner is slower than the best."""
    return 1 - SPEEDS[stages[-1].kept[0]] / max(SPEEDS.values())


def test_it_finds_a_candidate_within_5_percent_of_the_best() -> None:
    assert sum(loss(Machine(seed).race()) <= 0.05 for seed in range(1, 7)) >= 5


def test_with_measurements_that_say_nothing_it_does_not() -> None:
    same = dict.fromkeys(SPEEDS, 1.5)
    assert sum(loss(Machine(seed, speeds=same).race()) <= 0.05 for seed in range(1, 7)) <= 2


@pytest.mark.parametrize("seconds", [1.0, 7.0, 60.0, 300.0])
def test_it_keeps_to_the_time(seconds: float) -> None:
    machine = Machine(1)
    machine.race(seconds)
    longest = max(took for calls in machine.took.values() for took in calls.values())
    assert 0.5 * seconds < machine.now < seconds + longest
    assert machine.took["plain"], "the baseline comes first"


def test_half_go_on_and_the_last_stage_ranks() -> None:
    machine = Machine(3)
    stages = machine.race()
    assert stages[0].entered == tuple(machine.order)
    for before, after in itertools.pairwise(stages):
        assert after.entered == before.kept and after.examples > before.examples
        assert 0 < len(before.kept) <= (len(before.entered) + 1) // 2
    ranked = [stages[-1].ratios[name].value for name in stages[-1].kept]
    assert ranked == sorted(ranked, reverse=True)
    ranking = overall_ranking(stages)
    assert sorted(ranking) == sorted(RACERS) and ranking[: len(stages[-1].kept)] == list(stages[-1].kept)
    assert set(ranking[: len(stages[1].entered)]) == set(stages[1].entered), "who goes on is ahead of who does not"
    assert len(machine.took[stages[-1].kept[0]]) > 10 * len(machine.took[stages[0].entered[-1]])


def test_what_is_surely_slower_does_not_stay_in_the_faster_half() -> None:
    machine = Machine(4, noise=0.01, speeds={"plain": 1.0, "a": 3.0, "b": 1.0, "c": 0.9, "d": 0.8})
    machine.order = ["a", "b", "c", "d"]
    stages = machine.race()
    assert stages[0].kept == ("a",) and len(stages) == 1, "b is in the faster half, and surely slower"


def test_the_fastest_of_every_group_goes_on() -> None:
    machine = Machine(5)
    slow = ("c30", "c31")
    stages = machine.race(group=lambda name: "slow" if name in slow else "fast")
    assert all(set(slow) & set(stage.kept) for stage in stages)
    assert not any(set(slow) & set(stage.kept) for stage in Machine(5).race()[-2:])


def test_candidates_for_which_there_is_no_time_are_not_ranked() -> None:
    machine = Machine(6)
    (stage,) = machine.race(2.0)[:1]
    assert 0 < len(stage.ratios) < len(stage.entered)
    assert list(stage.ratios) == machine.order[: len(stage.ratios)], "the most promising were tried"


def test_without_candidates_nothing_is_measured() -> None:
    machine = Machine(7)
    machine.order = []
    assert machine.race() == [] and machine.now == 0


@pytest.mark.parametrize("seconds", [1.0, 7.0, 20.0, 60.0, 300.0])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_drops_out_for_its_speed_before_enough_examples(seconds: float, seed: int) -> None:
    machine = Machine(seed)
    stages = machine.race(seconds)
    if len(stages) == 1 and stages[0].examples < ENOUGH:
        assert all(found.low is None for found in stages[0].ratios.values()), "nothing can be chosen"
        assert stages[0].kept == tuple(sorted(stages[0].ratios, key=lambda name: -stages[0].ratios[name].value))
        return
    assert all(len(machine.took[name]) >= ENOUGH for name in stages[0].ratios)
    assert list(stages[0].ratios) == machine.order[: len(stages[0].ratios)], "the others are the last, not the slowest"
    assert stages[-1].ratios[stages[-1].kept[0]].low is not None


def test_a_short_time_tries_fewer_on_as_many_examples() -> None:
    tried = [len(Machine(2).race(seconds)[0].ratios) for seconds in (7.0, 20.0, 60.0, 300.0)]
    assert tried == sorted(tried) and 1 < tried[0] < tried[1] < tried[2] <= tried[3] == len(RACERS)


def slow_start(name: str, example: int) -> float:
    return 8.0 if name == "c0" and example < 2 else 1.0


def test_the_best_survives_two_bad_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = SPEEDS | {"c0": 6.0}
    assert Machine(8, speeds=speeds, factor=slow_start).race()[-1].kept[0] == "c0"
    monkeypatch.setattr(halving, "ENOUGH", 2)
    hasty = Machine(8, speeds=speeds, factor=slow_start).race(60.0)
    assert hasty[0].examples == 2 and "c0" not in hasty[0].kept, "the control"


def test_examples_that_take_longer_than_the_first_leave_fewer_candidates() -> None:
    def longer(name: str, example: int) -> float:
        return 1.0 if example == 0 else 10.0

    machine = Machine(9, factor=longer)
    (stage,) = machine.race(100.0)[:1]
    assert stage.examples >= ENOUGH and 1 <= len(stage.ratios) < len(RACERS)
    assert sum(0 in took for took in machine.took.values()) > 1 + len(stage.ratios), "more had begun"
    assert all(found.low is not None for found in stage.ratios.values())
