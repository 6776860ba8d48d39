"""Pairwise combinations: far fewer rows than all combinations, since most faults show where two settings meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value from each axis, such that any two values of different axes meet in at least one row.

    Greedy, and the same in every process: the next row is the first one with the most pairs that are still missing.
    """
    rows = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [tuple(axis[at] for axis, at in zip(axes, row, strict=True)) for row in chosen]
