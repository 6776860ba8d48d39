"""The chances of copied tokens."""

from __future__ import annotations

from hf_specdec.lengths.copy_chances import MOST_WEIGHT, CopyChances, Step


def test_chances_are_learned_by_match_and_by_what_followed() -> None:
    """Each situation alone; later tokens outweigh earlier ones."""
    chances = CopyChances()
    short, long, unsure = Step(5, 1, 1, 1), Step(5, 9, 1, 1), Step(5, 1, 1, 3)
    before = chances.chance(long), chances.chance(unsure)
    assert before[1] < chances.chance(short) < before[0]
    for _ in range(1000):
        chances.learn(short, is_right=True)
    assert chances.chance(short) > 0.99
    assert (chances.chance(long), chances.chance(unsure)) == before
    for _ in range(int(2 * MOST_WEIGHT)):
        chances.learn(short, is_right=False)
    assert chances.chance(short) < 0.2


def test_a_call_begins_with_what_earlier_ones_learned_and_soon_outweighs_it() -> None:
    """However many texts had no copies that were right, a few that are count."""
    known, step = CopyChances(), Step(5, 3, 1, 1)
    fresh = known.chance(step)
    for _ in range(6):
        text = CopyChances(known)
        for _ in range(200):
            text.learn(step, is_right=False)
    text = CopyChances(known)
    assert text.chance(step) < fresh / 2
    for _ in range(10):
        text.learn(step, is_right=True)
    assert text.chance(step) > 0.5 > known.chance(step)
