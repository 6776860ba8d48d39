"""What finished rounds tell about acceptance and the times of passes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.lengths.auto_length import AutoLength
from hf_specdec.lengths.estimates import PassTimes, PositionRates
from hf_specdec.rules.round_statistics import Round


def test_a_catch_up_pass_is_a_probe_s_cost_and_no_step_s() -> None:
    """It costs as much for one token as for many, which nothing but a round that made one can tell."""
    times = PassTimes()
    times.add(Round((0,), (0,), (1,), (0.0,), 0, 1, 0.0, 1.0, 1.0), 0.0)
    assert times.catch_up(1.0) < 0.1
    for _ in range(3):
        times.add(Round((2,), (0,), (1,), (0.0,), 2, 3, 0.8, 1.0, 1.8, catch_up_seconds=0.6), 1.0)
    assert times.step() == pytest.approx(0.1)
    assert times.catch_up(1.0) == pytest.approx(0.6)
    assert times.catch_up(1000.0) > 0.6
    rule = AutoLength()
    rule.known.times = times
    rule._unread = 1.0
    assert rule._loss(1) > 0.7


@pytest.mark.parametrize("prepared", [False, True])
def test_the_times_of_what_no_longer_runs_age(prepared: bool) -> None:
    """Passes may be recorded since, or have stalled: what was slow once would never be tried again."""
    times = PassTimes(prepared=prepared)
    times.first_round(Round((1,), (0,), (1,), (0.0,), 1, 101, 0.2, 2.0, 2.2))
    for _ in range(5):
        times.add(Round((4,), (0,), (1,), (0.0,), 4, 5, 4.0, 1.6, 5.6), 0.0)
    slow_pass, slow_step = times.target(5), times.step()
    for _ in range(100):
        times.add(Round((0,), (0,), (1,), (0.0,), 0, 1, 0.0, 1.0, 1.0), 0.0)
    assert times.target(5) < 1.47 < 1.55 < slow_pass
    assert times.step() < 0.12 < 0.8 < slow_step


def test_a_position_borrows_from_the_one_before_until_it_is_seen() -> None:
    positions = PositionRates(0.5)
    for _ in range(50):
        positions.add(2, 4, 1.0)
    reach = list(positions.reach())
    assert reach[0] > 0.95 and reach[1] > 0.9 and reach[2] < 0.1
    assert len(reach) == MAX_ASSISTANT_TOKENS and all(a >= b for a, b in pairwise(reach))


def test_the_cost_of_a_second_token_is_not_that_of_each_further_one() -> None:
    """Where two tokens cost half a pass more than one and further ones nothing, nine cost what five do."""
    estimates = {}
    for jump in (0.0, 0.5):
        times = PassTimes()
        for width in [1, 2, 3, 4, 5] * 5:
            seconds = 1.0 + jump * (width > 1) + 0.1 * (1 - 2 * jump) * (width - 1)
            times.add(Round((width - 1,), (0,), (1,), (0.0,), 0, width, 0.0, seconds, seconds), 0.0)
        estimates[jump] = times.target(9)
    assert estimates[0.0] == pytest.approx(1.8, abs=0.1)
    assert estimates[0.5] == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize(("known", "most"), [((1,), 1.85), ((1, 9), 1.2)])
def test_the_first_pass_of_a_width_may_be_a_stall(known: tuple[int, ...], most: float) -> None:
    """Other widths bound it, a wider one without allowance; passes after it count as they are."""
    times = PassTimes()
    for width, seconds in (*((width, 1.0 + width / 100) for width in known * 3), (5, 10.0)):
        times.add(Round((width - 1,), (0,), (1,), (0.0,), 0, width, 0.0, seconds, seconds), 0.0)
    assert times.target(5) < most
    for _ in range(3):
        times.add(Round((4,), (0,), (1,), (0.0,), 0, 5, 0.0, 10.0, 10.0), 0.0)
    assert times.target(5) > 5.0


@pytest.mark.parametrize("beginning", [0.1, 0.5, 1.2])
def test_a_prepared_draft_s_beginning_is_told_from_its_steps(beginning: float) -> None:
    """Its first pass reads two tokens. Drafts of one token alone can't tell, those of one and eight can."""
    times = PassTimes(prepared=True)

    def add(steps: int) -> None:
        drafting = 0.1 * (steps + beginning)
        times.add(Round((steps,), (0,), (1,), (0.0,), steps, steps + 1, drafting, 1.0, 1.0 + drafting), 0.0)

    add(1)
    alone = times.drafting(8)
    assert alone == pytest.approx(0.1 * (1 + beginning) * 8.5 / 1.5)
    for _ in range(3):
        add(8)
    assert times.drafting(8) == pytest.approx(0.1 * (8 + beginning))
    assert times.drafting(16) == pytest.approx(0.1 * (16 + beginning), rel=0.03)
