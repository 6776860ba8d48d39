"""How many copied tokens are worth verifying: the chances that they are right, and what a wider pass takes for them.

Copies take no draft steps, so the width of the target's pass is all they cost. Times are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

# The chance that a copied token is right, before it is learned: as in the greedy answers of a small chat model. By the
# number of tokens before it that were found (1, 2, 3, 4 to 7, more), and by what followed these: one token once, the
# same one always, one at least half of the time, or less often.
PRIOR_CHANCES = (
    (0.3, 0.5, 0.65, 0.75, 0.92),
    (0.5, 0.75, 0.8, 0.87, 0.94),
    (0.2, 0.35, 0.35, 0.4, 0.5),
    (0.13, 0.15, 0.25, 0.25, 0.3),
)
# In tokens: what the assumed chances count, and what all tokens count at most, so that later ones outweigh earlier.
PRIOR_WEIGHT, MOST_WEIGHT = 10.0, 100.0
PRIOR_SLOPE = 0.06  # each further token's share of a pass, before passes are timed
# Tokens per row that the time of a plain pass has to bring. More than one, since rounds with long copies bring more for
# theirs, and since the chances of what seems to pay are overestimated more often than not.
WORTH = 2.0


class Step(NamedTuple):
    """One token of a copy.

    Args:
        token: what most often followed, the latest of several.
        length: the number of tokens before it that were found elsewhere.
        seen, total: how often it followed them, and how often any token did.
    """

    token: int
    length: int
    seen: int
    total: int


class CopyChances:
    """Chances that copied tokens are right, learned from what really followed, verified or not."""

    def __init__(self) -> None:
        self._right = [[PRIOR_WEIGHT * chance for chance in row] for row in PRIOR_CHANCES]
        self._tried = [[PRIOR_WEIGHT] * len(row) for row in PRIOR_CHANCES]

    def chance(self, step: Step) -> float:
        """The chance that a step's token is right if those before it are."""
        kind, size = _situation(step)
        return self._right[kind][size] / self._tried[kind][size]

    def learn(self, step: Step, is_right: bool) -> None:
        """Learn whether a step's token followed."""
        kind, size = _situation(step)
        right, tried = self._right[kind], self._tried[kind]
        kept = min(1.0, (MOST_WEIGHT - 1.0) / tried[size])
        right[size] = right[size] * kept + is_right
        tried[size] = tried[size] * kept + 1.0


def _situation(step: Step) -> tuple[int, int]:
    """Row and column of a step in `PRIOR_CHANCES`."""
    followed = int(step.total > 1) if step.seen == step.total else 2 if 2 * step.seen >= step.total else 3
    return followed, step.length - 1 if step.length < 4 else 3 if step.length < 8 else 4


def worthwhile(reaches: Sequence[Sequence[float]], cost: Callable[[int], float]) -> int:
    """The number of copied tokens per row that is worth a wider pass; 0 if none is.

    Args:
        reaches: for each row that goes on, the chances that its first, second, … copied tokens are all right.
        cost: the time of a pass by its width.
    """
    plain, best, most = cost(1), 0, 0.0
    gains = accumulate(map(sum, zip_longest(*reaches, fillvalue=0.0)))
    for count, gain in enumerate(gains, start=1):
        worth = gain - WORTH * len(reaches) * (cost(count + 1) / plain - 1.0)
        if worth > most:
            best, most = count, worth
    return best
