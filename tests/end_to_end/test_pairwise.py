"""The rows that stand for whole grids in other tests."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from helpers.pairwise import pairwise


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3, 2), (3, 3, 2, 2), (2, 2, 2, 3, 2)])
def test_any_two_values_meet_and_few_rows_are_needed(sizes: tuple[int, ...]) -> None:
    axes = [[f"{number}{value}" for value in range(size)] for number, size in enumerate(sizes)]
    rows = pairwise(*axes)
    for (one, values), (other, others) in combinations(enumerate(axes), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(values, others))
    two_largest = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert two_largest <= len(rows) <= two_largest + 3
    assert rows == pairwise(*axes)
