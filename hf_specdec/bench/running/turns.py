"""The order in which methods take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def turn(items: Sequence[Item], number: int) -> list[Item]:
    """The items in the order of turn `number`, so that no item always comes early, or always behind the same other.

    Over as many turns as there are items, twice as many if their count is odd, each stands equally often in each place
    and behind each other (the Latin squares of Williams, 1949).
    """
    count = len(items)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [items[(number + step) % count] for step in zigzag]
    return order[::-1] if count % 2 and number // count % 2 else order
