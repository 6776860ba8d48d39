"""The order in which methods take turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def turn(items: Sequence[Item], number: int) -> list[Item]:
    """The items in the order of turn `number`, so that no item always comes early, or always after the same other.

    Over `cycle(len(items))` turns in a row, each item takes each place equally often, and within turns it follows each
    other item equally often (the Latin squares of Williams, 1949). The first item of a turn follows the last of the
    turn before.
    """
    count = len(items)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [items[(number + step) % count] for step in zigzag]
    return order[::-1] if count % 2 and number // count % 2 else order


def cycle(count: int) -> int:
    """The number of turns after which the orders of `count` items repeat."""
    return count * (1 + count % 2)


def turn_number(repeat: int, place: int, places: int, count: int) -> int:
    """The number of the turn that `count` items take on one example in one repeat.

    Each repeat uses the next `places` numbers, so that every number is used once. An example gets another order in
    every repeat, for up to `cycle(count)` repeats: otherwise the order would bias its ratios.

    Args:
        place: index of the example among `places`.
    """
    # Without the shift an example's order would repeat whenever its numbers are a multiple of the cycle apart.
    shift = repeat * places // math.lcm(places, cycle(count))
    return repeat * places + (place + shift) % places
