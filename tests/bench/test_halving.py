"""Successive halving on a simulated machine: it finds the fastest candidate, keeps to its time, and can fail."""

import itertools
import random
from collections.abc import Callable

import pytest

from hf_specdec.bench.figures.bootstrap import ENOUGH, interval
from hf_specdec.bench.records import Interval
from hf_specdec.bench.tuning import halving
from hf_specdec.bench.tuning.halving import successive_halving

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

    def race(self, seconds: float = SECONDS, group: Callable[[str], str] = lambda name: "") -> list[list[str]]:
        return successive_halving(
            self.order, "plain", self.measure, self.ratio, seconds=seconds, group=group, clock=lambda: self.now
        )


def loss(rankings: list[list[str]]) -> float:
    """By how much the winner is slower than the best."""
    return 1 - SPEEDS[rankings[-1][0]] / max(SPEEDS.values())


def test_it_finds_a_candidate_within_5_percent_of_the_best() -> None:
    assert sum(loss(Machine(seed).race()) <= 0.05 for seed in range(1, 5)) >= 3
    same = dict.fromkeys(SPEEDS, 1.5)
    assert sum(loss(Machine(seed, speeds=same).race()) <= 0.05 for seed in range(1, 5)) <= 1, "the control"


@pytest.mark.parametrize("seconds", [1.0, 7.0, 60.0, 300.0])
def test_it_keeps_to_the_time(seconds: float) -> None:
    machine = Machine(1)
    machine.race(seconds)
    longest = max(took for calls in machine.took.values() for took in calls.values())
    assert 0.5 * seconds < machine.now < seconds + longest
    assert machine.took["plain"], "the baseline comes first"


def test_half_go_on_and_each_stage_ranks() -> None:
    machine = Machine(3)
    rankings = machine.race()
    assert sorted(rankings[0]) == sorted(RACERS)
    for before, after in itertools.pairwise(rankings):
        assert set(after) < set(before) and 0 < len(after) <= (len(before) + 1) // 2
    values = [machine.ratio(name, "plain").value for name in rankings[-1]]  # type: ignore[union-attr]
    assert values == sorted(values, reverse=True)
    assert len(machine.took[rankings[-1][0]]) > 10 * len(machine.took[rankings[0][-1]])


def test_what_is_surely_slower_does_not_stay_in_the_faster_half() -> None:
    machine = Machine(4, noise=0.01, speeds={"plain": 1.0, "a": 3.0, "b": 1.0, "c": 0.9, "d": 0.8})
    machine.order = ["a", "b", "c", "d"]
    rankings = machine.race()
    assert len(rankings) == 1 and rankings[0][0] == "a", "b is in the faster half, and surely slower"


def test_the_fastest_of_every_group_goes_on() -> None:
    slow = {"c30", "c31"}
    rankings = Machine(5).race(group=lambda name: "slow" if name in slow else "fast")
    assert all(slow & set(ranking) for ranking in rankings)
    assert not any(slow & set(ranking) for ranking in Machine(5).race()[-2:])


def test_without_candidates_nothing_is_measured() -> None:
    machine = Machine(7)
    machine.order = []
    assert machine.race() == [] and machine.now == 0


@pytest.mark.parametrize("seconds", [1.0, 2.0, 7.0, 20.0, 60.0, 300.0])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_drops_out_for_its_speed_before_enough_examples(seconds: float, seed: int) -> None:
    machine = Machine(seed)
    rankings = machine.race(seconds)
    first = rankings[0]
    assert first and set(first) == set(machine.order[: len(first)]), "what is left out is the last, not the slowest"
    if len(rankings) > 1 or len(machine.took["plain"]) > ENOUGH:
        assert all(len(machine.took[name]) >= ENOUGH for name in first)
        assert machine.ratio(rankings[-1][0], "plain").low is not None  # type: ignore[union-attr]


def test_a_short_time_tries_fewer_on_as_many_examples() -> None:
    tried = [len(Machine(2).race(seconds)[0]) for seconds in (7.0, 20.0, 60.0, 300.0)]
    assert tried == sorted(tried) and 1 < tried[0] < tried[1] < tried[2] <= tried[3] == len(RACERS)


def slow_start(name: str, example: int) -> float:
    return 8.0 if name == "c0" and example < 2 else 1.0


def test_the_best_survives_two_bad_examples(monkeypatch) -> None:
    speeds = SPEEDS | {"c0": 6.0}
    assert Machine(8, speeds=speeds, factor=slow_start).race()[-1][0] == "c0"
    monkeypatch.setattr(halving, "ENOUGH", 2)
    hasty = Machine(8, speeds=speeds, factor=slow_start).race(10.0)
    assert "c0" not in hasty[1], "the control"


def test_examples_that_take_longer_than_the_first_leave_fewer_candidates() -> None:
    def longer(name: str, example: int) -> float:
        return 1.0 if example == 0 else 10.0

    machine = Machine(9, factor=longer)
    first = machine.race(100.0)[0]
    assert 1 <= len(first) < len(RACERS)
    assert sum(0 in took for took in machine.took.values()) > 1 + len(first), "more had begun"
    assert all(machine.ratio(name, "plain").low is not None for name in first)  # type: ignore[union-attr]
