"""Turns: every place, and every neighbour, equally often."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from hf_specdec.bench.running.turns import turn


@pytest.mark.parametrize("count", range(1, 14))
def test_each_item_stands_in_each_place_and_behind_each_other_equally_often(count: int) -> None:
    items = list(range(count))
    orders = [turn(items, number) for number in range(2 * count)]
    assert all(sorted(order) == items for order in orders)
    places = Counter((place, item) for order in orders for place, item in enumerate(order))
    neighbours = Counter(pair for order in orders for pair in pairwise(order))
    assert len(places) == count**2 and len(set(places.values())) == 1
    assert len(neighbours) == count * (count - 1) and len(set(neighbours.values())) <= 1


def test_rotation_does_not_do_that() -> None:
    """The negative control: in a rotation each follows the same other in all turns but one."""
    orders = [[*range(shift, 5), *range(shift)] for shift in range(5)]
    assert len(Counter(pair for order in orders for pair in pairwise(order))) == 5
