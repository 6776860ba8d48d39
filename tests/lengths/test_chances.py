"""The chances that drafted tokens are right."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.lengths.chances import MOST_WEIGHT, DraftChances, Step, of_copies


def test_chances_are_learned_by_match_and_by_what_followed() -> None:
    """Each situation alone; later tokens outweigh earlier ones."""
    chances = of_copies()
    short, long, unsure = (Step(5, *step).situation for step in ((1, 1, 1), (9, 1, 1), (1, 1, 3)))
    before = chances[long], chances[unsure]
    assert before[1] < chances[short] < before[0]
    for _ in range(1000):
        chances.learn(short, is_right=True)
    assert chances[short] > 0.99
    assert (chances[long], chances[unsure]) == before
    for _ in range(int(2 * MOST_WEIGHT)):
        chances.learn(short, is_right=False)
    assert chances[short] < 0.2


def test_a_call_begins_with_what_earlier_ones_learned_and_soon_outweighs_it() -> None:
    """However many texts had no copies that were right, a few that are count."""
    chances, step = of_copies(), Step(5, 3, 1, 1).situation
    fresh = chances[step]
    for _ in range(6):
        chances.begin()
        for _ in range(200):
            chances.learn(step, is_right=False)
    chances.begin()
    earlier = chances[step]
    assert earlier < fresh / 2
    for _ in range(10):
        chances.learn(step, is_right=True)
    assert chances[step] > 0.5
    chances.begin()
    assert earlier < chances[step] < 0.4


def test_a_position_is_like_the_one_before_until_it_is_seen() -> None:
    chances = DraftChances()
    for _ in range(50):
        chances.learn_draft(2, 4, 1.0)
    reach = list(chances.reach())
    assert reach[0] > 0.95 and reach[1] > 0.9 and reach[2] < 0.1
    assert len(reach) == MAX_ASSISTANT_TOKENS and all(a >= b for a, b in pairwise(reach))


def test_a_text_that_is_harder_at_first_tokens_is_harder_at_later_ones() -> None:
    """Though these are never reached in it, and were always right in earlier calls."""
    chances = DraftChances()
    for _ in range(50):
        chances.learn_draft(8, 8, 1.0)
    chances.begin()
    assert list(chances.reach())[7] > 0.9
    for _ in range(5):
        chances.fade()
        chances.learn_draft(0, 8, 1.0)
    first, second, *_ = chances.reach()
    assert first < 0.65 and second < 0.8 * first


def test_rows_of_a_batch_count_as_one_together() -> None:
    alone, batch = DraftChances(), DraftChances()
    alone.learn_draft(1, 4, 1.0)
    for _ in range(4):
        batch.learn_draft(1, 4, 0.25)
    assert list(batch.reach()) == pytest.approx(list(alone.reach()))
