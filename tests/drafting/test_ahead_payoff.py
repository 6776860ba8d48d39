"""Drafting ahead continues if rounds are faster with it, and stops if they are not."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from hf_specdec.drafting.ahead_payoff import LONGEST_WAIT, STRETCH, AheadPayoff
from hf_specdec.rules.round_statistics import Round


def finished(seconds: float, drafted: int = 4, width: int | None = None) -> Round:
    return Round((drafted,), (0,), (1,), (0.0,), drafted, width or drafted + 1, 0.0, seconds, seconds)


def simulate(rule: AheadPayoff, hit: float, missed: float, without: float, share: float, rounds: int) -> list[bool]:
    """Which rounds drafted ahead, where a round takes `hit` or `missed` seconds with it, by the share of hits.

    Times spread by a tenth; one round in fifty stalls for ten times as long.
    """
    chance, went, before = random.Random(1), [], False
    for _ in range(rounds):
        went.append(rule.worth_it)
        seconds = hit if before and chance.random() < share else missed if rule.worth_it else without
        before = rule.worth_it
        stall = 10.0 if chance.random() < 0.02 else 1.0
        rule.observe(finished(seconds * stall * chance.lognormvariate(0.0, 0.1)))
    return went


@pytest.mark.parametrize(
    ("hit", "missed", "share", "pays"),
    [
        (0.6, 1.0, 0.7, True),
        (0.6, 1.3, 0.9, True),
        (0.9, 1.4, 0.3, False),
        (1.5, 1.9, 0.8, False),
        (1.0, 1.6, 0.0, False),
    ],
    ids=["hidden", "nearly always right", "seldom right", "slower than the target", "never right"],
)
def test_the_faster_way_is_taken(hit: float, missed: float, share: float, pays: bool) -> None:
    went = simulate(AheadPayoff(), hit, missed, 1.0, share, 1200)
    late = went[200:]
    assert (sum(late) / len(late) > 0.9) == pays
    assert (sum(late) / len(late) < 0.1) == (not pays)
    assert len(set(late)) == 2, "the other way is tried now and then"


def test_it_starts_with_drafting_ahead_and_turns_with_the_times() -> None:
    rule = AheadPayoff()
    assert all(simulate(rule, 0.5, 0.5, 1.0, 1.0, STRETCH + 1))
    assert not rule.worth_it, "then the other way is tried"
    simulate(rule, 0.5, 0.5, 1.0, 1.0, 300)
    assert sum(simulate(rule, 2.0, 2.0, 1.0, 1.0, 3000)[-300:]) < 30


def test_trials_become_rarer() -> None:
    went = simulate(AheadPayoff(), 2.0, 2.0, 1.0, 1.0, 5000)
    trials = [n for n in range(1, len(went)) if went[n] and not went[n - 1]]
    gaps = [after - before for before, after in pairwise(trials)]
    assert gaps == sorted(gaps) and gaps[0] < gaps[-1] <= (LONGEST_WAIT + 1) * STRETCH


def test_rounds_that_teach_nothing_are_passed_over() -> None:
    """Without drafts, without times, and those that read a prompt."""
    rule = AheadPayoff()
    for _ in range(100):
        rule.observe(finished(1.0, drafted=0, width=1))
        rule.observe(finished(0.0))
        rule.observe(finished(1.0, width=50))
    assert rule.worth_it and not rule._seconds
