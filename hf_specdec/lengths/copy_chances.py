"""The chances that copied tokens are right."""

from __future__ import annotations

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
# In tokens: what the chances count that a call begins with, and what all tokens count at most, so that later ones
# outweigh earlier.
PRIOR_WEIGHT, MOST_WEIGHT = 10.0, 100.0


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
    """Chances that copied tokens are right, learned from what really followed, verified or not.

    Args:
        earlier: those of earlier calls, which begin this one's and learn with them. They count as little as assumed
            ones, since texts differ: without copies that were right in the last text, many may be in this one.
    """

    def __init__(self, earlier: CopyChances | None = None) -> None:
        self._earlier = earlier
        self._right = [
            [PRIOR_WEIGHT * chance for chance in row] for row in (earlier.all() if earlier else PRIOR_CHANCES)
        ]
        self._tried = [[PRIOR_WEIGHT] * len(row) for row in PRIOR_CHANCES]

    def chance(self, step: Step) -> float:
        """The chance that a step's token is right if those before it are."""
        kind, size = _situation(step)
        return self._right[kind][size] / self._tried[kind][size]

    def all(self) -> list[list[float]]:
        """The chances in all situations, as in `PRIOR_CHANCES`."""
        tried = zip(self._right, self._tried, strict=True)
        return [[right / of for right, of in zip(*row, strict=True)] for row in tried]

    def learn(self, step: Step, is_right: bool) -> None:
        """Learn whether a step's token followed."""
        if self._earlier is not None:
            self._earlier.learn(step, is_right)
        kind, size = _situation(step)
        right, tried = self._right[kind], self._tried[kind]
        kept = min(1.0, (MOST_WEIGHT - 1.0) / tried[size])
        right[size] = right[size] * kept + is_right
        tried[size] = tried[size] * kept + 1.0


def _situation(step: Step) -> tuple[int, int]:
    """Row and column of a step in `PRIOR_CHANCES`."""
    followed = int(step.total > 1) if step.seen == step.total else 2 if 2 * step.seen >= step.total else 3
    return followed, step.length - 1 if step.length < 4 else 3 if step.length < 8 else 4
