"""Pairwise combinations: far fewer rows than all combinations, since most faults show where two settings meet."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(
    *axes: Sequence[Any],
    allowed: Callable[..., bool] = lambda *row: True,
    cost: Callable[..., float] = lambda *row: 1.0,
) -> list[tuple[Any, ...]]:
    """Rows of one value from each axis, such that any two values of different axes meet in at least one row.

    Greedy, and the same in every process: the next row is the first one with the most missing pairs for its cost.

    Args:
        axes: the values of each axis.
        allowed: whether a row of these values may be chosen; pairs that meet in none are left out.
        cost: what a row of these values costs, so that few of the expensive ones are chosen.
    """
    bits: dict[tuple[Any, ...], int] = {}
    rows = []
    for places in product(*(range(len(axis)) for axis in axes)):
        row = tuple(axis[at] for axis, at in zip(axes, places, strict=True))
        if allowed(*row):
            pairs = combinations(enumerate(places), 2)
            rows.append((row, sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs), 1.0 / cost(*row)))
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        row, met, _ = max(rows, key=lambda row: (row[1] & missing).bit_count() * row[2])
        chosen.append(row)
        missing &= ~met
    return chosen
