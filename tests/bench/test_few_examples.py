"""Intervals to decide by: honest on few examples, and none on fewer than can have one."""

from __future__ import annotations

import math
import random

import pytest

from hf_specdec.bench.figures.bootstrap import ENOUGH, Cells, interval
from hf_specdec.bench.figures.races import deciding_race

SPREAD, TRIALS = 0.3, 300
TRUTH = math.exp(SPREAD**2 / 2)  # the mean of the draws below


def ratio(ours: float, base: float) -> float:
    return ours / base


def drawn(count: int, seed: int, repeats: int = 1) -> Cells:
    draws = random.Random(seed)
    return [[(draws.lognormvariate(0, SPREAD), 1.0)] * repeats for _ in range(count)]


def coverage(count: int, *, deciding: bool) -> float:
    """How often the interval holds the truth."""
    hits = 0
    for seed in range(TRIALS):
        found = interval(drawn(count, seed), ratio, deciding=deciding)
        assert found is not None and found.low is not None and found.high is not None
        hits += found.low <= TRUTH <= found.high
    return hits / TRIALS


def test_enough_is_the_least_number_whose_range_is_a_95_percent_interval() -> None:
    assert 1 - 2 ** (1 - ENOUGH) >= 0.95 > 1 - 2 ** (2 - ENOUGH)


@pytest.mark.parametrize("count", range(1, ENOUGH + 2))
def test_fewer_examples_have_no_interval_to_decide_by(count: int) -> None:
    for repeats in (1, 4):  # more of the same is no further example
        found = interval(drawn(count, 1, repeats), ratio, deciding=True)
        assert found is not None and (found.low is None) == (found.high is None) == (count < ENOUGH)
        plain = interval(drawn(count, 1, repeats), ratio)
        assert plain is not None and found.value == plain.value


def test_it_holds_the_truth_about_as_often_as_it_says() -> None:
    assert coverage(ENOUGH, deciding=True) >= 0.9
    assert coverage(10, deciding=True) >= 0.91


def test_the_plain_percentile_interval_does_not() -> None:
    """The negative control: what decided before."""
    assert coverage(ENOUGH, deciding=False) < 0.87
    assert coverage(2, deciding=False) < 0.55


@pytest.mark.parametrize("count", [ENOUGH, 10, 80])
def test_it_is_wider_and_the_less_so_the_more_examples_there_are(count: int) -> None:
    wide, narrow = (interval(drawn(count, 3), ratio, deciding=deciding) for deciding in (True, False))
    assert wide is not None and wide.low is not None and wide.high is not None
    assert narrow is not None and narrow.low is not None and narrow.high is not None
    assert wide.low <= narrow.low and narrow.high <= wide.high
    more = (wide.high - wide.low) / (narrow.high - narrow.low)
    assert more > 1.1 if count <= 10 else more < 1.1


SURE, UNSURE = [2.0, 1.5, 2.5], [3.0, None, None]
RACES = {
    "sure": [{"kept": ["a"], "ratios": {"a": SURE}}],
    "unsure": [{"kept": ["a"], "ratios": {"a": UNSURE}}],
    "one sure": [{"kept": ["b", "a"], "ratios": {"a": SURE, "b": UNSURE}}],
    "surely dropped": [{"kept": ["b"], "ratios": {"a": SURE, "b": UNSURE}}],
    "nobody": [{"kept": [], "ratios": {}}],
    "not run": [],
}


@pytest.mark.parametrize(
    ("names", "decides"),
    [
        (["sure"], 0),
        (["sure", "sure"], 1),
        (["sure", "one sure"], 1),
        (["sure", "unsure"], 0),
        (["sure", "surely dropped"], 0),
        (["sure", "nobody"], 0),
        (["sure", "not run"], 0),
        (["unsure", "unsure"], 1),
        (["unsure", "nobody"], 0),
        (["nobody", "not run"], None),
        ([], None),
    ],
)
def test_the_last_race_with_enough_examples_decides(names: list[str], decides: int | None) -> None:
    assert deciding_race([RACES[name] for name in names]) == decides
