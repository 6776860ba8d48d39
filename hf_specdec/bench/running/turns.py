"""The order in which methods take turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def turn(items: Sequence[Item], number: int) -> list[Item]:
    """The items in the order of turn `number`, so that no item always comes early, or always behind the same other.

    Over `cycle(len(items))` turns in a row, each stands equally often in each place, and within the turns equally often
    behind each other (the Latin squares of Williams, 1949). What a turn begins with follows what ended the one before.
    """
    count = len(items)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [items[(number + step) % count] for step in zigzag]
    return order[::-1] if count % 2 and number // count % 2 else order


def cycle(count: int) -> int:
    """After how many turns the orders of so many items come again."""
    return count * (1 + count % 2)


def turn_number(repeat: int, place: int, places: int, count: int) -> int:
    """The number of the turn that `count` items take on one of several examples in one of the repeats.

    Each repeat has the next `places` numbers, so that all numbers up to there are used once. An example gets another
    order in every repeat, up to `cycle(count)` of them: otherwise the order would be a part of its ratios.

    Args:
        place: the example's, of so many `places`.
    """
    # Without the shift an example's orders would come again as soon as its numbers are a multiple of the cycle apart.
    shift = repeat * places // math.lcm(places, cycle(count))
    return repeat * places + (place + shift) % places
