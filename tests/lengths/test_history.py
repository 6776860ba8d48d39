"""What finished rounds tell about the times of passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_specdec.lengths.history import REMEMBERED, LengthHistory
from hf_specdec.rules.round_statistics import Round


def finished(drafted: int, seconds: float, drafting: float = 0.0, catch_up: float = 0.0) -> Round:
    steps, whole = drafted if drafting else 0, drafting + seconds
    return Round((drafted,), (0,), (1,), (0.0,), steps, drafted + 1, drafting, seconds, whole, catch_up)


def test_a_catch_up_pass_is_a_trial_s_price_and_no_step_s() -> None:
    """It costs as much for one token as for many, which nothing but a round that made one can tell."""
    known = LengthHistory()
    known.learn(finished(0, 1.0))
    before = known.price(2.0)
    for _ in range(3):
        known.learn(finished(2, 1.0, drafting=0.8, catch_up=0.6), 2)
    assert known.seconds(0, 2) == pytest.approx(1.0 + 0.2)
    assert known.price(2.0) > known.price(1.0) + 0.5 > before
    assert known.price(1000.0) > known.price(2.0)


def test_passes_that_are_being_recorded_teach_no_times() -> None:
    """They take longer than later ones, so that their length would not be tried again. Settled ones are the control."""
    known, control = LengthHistory(), LengthHistory()
    for one, settled in ((known, False), (control, True)):
        one.learn(finished(0, 1.0))
        one.learn(replace(finished(2, 3.0), settled=settled))
    assert known.seconds(2, 0) < 1.1 < 1.4 < control.seconds(2, 0)


def test_what_no_longer_runs_is_forgotten() -> None:
    """Passes may be recorded since, or have stalled: what was slow once would never be tried again."""
    known = LengthHistory()
    known.learn(finished(0, 1.0))
    for _ in range(5):
        known.learn(finished(4, 9.0, drafting=4.0), 4)
    assert known.seconds(0, 4) > 12.0
    for _ in range(REMEMBERED + 1):
        known.learn(finished(2, 1.1, drafting=0.2), 2)
    assert known.seconds(0, 4) < 1.8


def test_rounds_without_drafts_forget_nothing_but_a_trial_s_times() -> None:
    known = LengthHistory()
    for drafted, seconds in ((0, 1.0), (1, 5.0), (4, 9.0)):
        for _ in range(3):
            known.learn(finished(drafted, seconds, drafting=1.0 * (drafted > 0)), drafted)
    for _ in range(3 * REMEMBERED):
        known.learn(finished(0, 1.0))
    assert known.seconds(0, 1) == 6.0 and known.seconds(0, 4) == 10.0
    known.begin_trial()
    assert known.seconds(0, 1) < 4.0 and known.seconds(0, 4) == 10.0


def test_lengths_that_never_ran_lie_on_straight_lines() -> None:
    """Between known ones; beyond them, a second token's cost is not that of each further one."""
    known = LengthHistory()
    for _ in range(5):
        for drafted, seconds in ((0, 1.0), (2, 1.6), (4, 1.7), (8, 1.9)):
            known.learn(finished(drafted, seconds))
    assert known.seconds(6, 0) == pytest.approx(1.8)
    assert known.seconds(1, 0) == pytest.approx(1.3)
    assert known.seconds(16, 0) == pytest.approx(2.3, abs=0.05)


@pytest.mark.parametrize(("ran", "most"), [((0,), 1.8), ((0, 8), 1.6)])
def test_the_first_pass_of_a_width_may_be_a_stall(ran: tuple[int, ...], most: float) -> None:
    """It counts as half as much again as was expected, at most; passes after it count as they are."""
    known = LengthHistory()
    for drafted in ran * 3:
        known.learn(finished(drafted, 1.0 + drafted / 100))
    known.learn(finished(4, 10.0))
    assert known.seconds(4, 0) < most
    for _ in range(3):
        known.learn(finished(4, 10.0))
    assert known.seconds(4, 0) == 10.0


def test_the_draft_s_share_of_the_prompts_pass_tells_a_step_s_time() -> None:
    known = LengthHistory()
    known.learn_first(Round((1,), (0,), (1,), (0.0,), 1, 101, 0.6, 2.0, 2.6))
    known.learn(finished(0, 1.0))
    assert known.seconds(0, 2) == pytest.approx(1.08 + 0.6)
