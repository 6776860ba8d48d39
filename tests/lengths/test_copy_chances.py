"""The chances of copied tokens, and how many of them are worth a wider pass."""

from __future__ import annotations

import random

import pytest

from hf_specdec.lengths.copy_chances import MOST_WEIGHT, WORTH, CopyChances, Step, worthwhile


@pytest.mark.parametrize("seed", range(20))
def test_no_other_width_is_worth_more(seed: int) -> None:
    chance = random.Random(seed)
    reaches = [sorted((chance.random() for _ in range(chance.randrange(7))), reverse=True) for _ in range(3)]
    costs = [1.0]
    for _ in range(8):
        costs.append(costs[-1] + chance.choice((0.01, 0.1, 0.4)))
    worth = [
        sum(sum(reach[:count]) for reach in reaches) - WORTH * 3 * (costs[count] / costs[0] - 1.0) for count in range(8)
    ]
    assert worth[worthwhile(reaches, lambda width: costs[width - 1])] == pytest.approx(max(worth))


def test_nothing_found_is_worth_nothing() -> None:
    assert worthwhile([], float) == worthwhile([[], []], float) == 0


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
