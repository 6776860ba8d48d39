"""Chooses what a round drafts: nothing, copies or the model's tokens, whichever yields the most tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple


class Choice(NamedTuple):
    """What a round drafts.

    Args:
        copied: the most tokens that are copied for a row.
        modelled: the rows in which the model drafts; the others copy.
        saved: the seconds that copies are expected to save.
    """

    copied: int
    modelled: Collection[int]
    saved: float = 0.0


def best_choice(
    copies: Mapping[int, Sequence[float]],
    drafted: float,
    steps: int,
    seconds: Callable[[int, int], float],
    counts: Iterable[int],
) -> Choice:
    """The choice with the most expected tokens per second, over all rows together.

    Args:
        copies: for each unfinished row, the chances that its first copied token, the first two, … are all right.
        drafted: the expected number of the model's tokens that are accepted in a row.
        steps: the number of the model's draft steps; 0 if there is no model.
        seconds: returns the time of a round, given the most tokens copied for a row and the model's steps.
        counts: the numbers of copied tokens to choose from, ascending.
    """
    rows, by_model = len(copies), drafted if steps else 0.0
    best = Choice(0, frozenset(copies) if steps else ())
    rate = without = max((rows + rows * by_model) / seconds(0, steps), rows / seconds(0, 0))
    sums = {row: list(accumulate(chances, initial=0.0)) for row, chances in copies.items()}
    longest = max(map(len, copies.values()), default=0)
    for count in counts if longest else ():
        found = {row: reached[min(count, len(reached) - 1)] for row, reached in sums.items()}
        copied = seconds(count, 0)
        alone = (rows + sum(found.values())) / copied
        if alone > rate:
            best, rate = Choice(count, (), copied * (alone / without - 1.0)), alone
        if steps:
            both = seconds(count, steps)
            beside = (rows + sum(max(tokens, by_model) for tokens in found.values())) / both
            if beside > rate:
                by = frozenset(row for row, tokens in found.items() if tokens <= by_model)
                best, rate = Choice(count, by, both * (beside / without - 1.0)), beside
        if count >= longest:
            break
    return best
