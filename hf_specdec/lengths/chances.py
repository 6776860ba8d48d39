"""The chances that drafted tokens are right, learned from what really followed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hf_specdec.config import MAX_ASSISTANT_TOKENS

# In tokens: what earlier calls count as in a new one, and a position's chance at the next position. With more, a text
# that is harder than those before is drafted for too long; with less, bad luck shortens the drafts of an easy one.
EARLIER_WEIGHT, NEIGHBOUR_WEIGHT = 5.0, 2.0
MOST_WEIGHT = 40.0  # of all tokens, so that later ones outweigh earlier
DECAY = 0.95  # what a round counts after the next one
PRIOR_ACCEPTANCE = 0.75  # the chance of a model's token, before it is learned
# The same for copied tokens: as in the greedy answers of a small chat model. By the number of tokens before it that
# were found (1, 2, 3, 4 to 7, more), and by what followed these: one token once, the same one always, one at least half
# of the time, or less often.
PRIOR_COPIES = (
    (0.3, 0.5, 0.65, 0.75, 0.92),
    (0.5, 0.75, 0.8, 0.87, 0.94),
    (0.2, 0.35, 0.35, 0.4, 0.5),
    (0.13, 0.15, 0.25, 0.25, 0.3),
)


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

    @property
    def situation(self) -> int:
        """Its place in `PRIOR_COPIES`, row after row."""
        followed = int(self.total > 1) if self.seen == self.total else 2 if 2 * self.seen >= self.total else 3
        return 5 * followed + (self.length - 1 if self.length < 4 else 3 if self.length < 8 else 4)


class Chances:
    """Chances by situation: of all calls, and of this one, which begins with those of all.

    Args:
        prior: the chances before any token was seen.
        weight: how many tokens they count as.
    """

    def __init__(self, prior: Sequence[float], weight: float = EARLIER_WEIGHT) -> None:
        self._all = [[weight * chance, weight] for chance in prior]
        self.begin()

    def begin(self) -> None:
        """Begin a call."""
        self._now = [[0.0, 0.0] for _ in self._all]

    def learn(self, situation: int, is_right: bool, weight: float = 1.0) -> None:
        """Learn from a token, or from one of `1 / weight` rows."""
        for counts in (self._all[situation], self._now[situation]):
            kept = min(1.0, (MOST_WEIGHT - weight) / counts[1]) if counts[1] else 0.0
            counts[:] = kept * counts[0] + weight * is_right, kept * counts[1] + weight

    def __getitem__(self, situation: int) -> float:
        (usual, all_tried), (right, tried) = self._all[situation], self._now[situation]
        return (right + EARLIER_WEIGHT * usual / all_tried) / (tried + EARLIER_WEIGHT)


class DraftChances(Chances):
    """Chances of the model's tokens by position in the draft, each if those before it were right."""

    def __init__(self) -> None:
        super().__init__([0.0] * MAX_ASSISTANT_TOKENS, 0.0)

    def fade(self) -> None:
        """Let earlier rounds of this call count less."""
        self._now = [[kept * right, kept * tried] for kept in (DECAY,) for right, tried in self._now]

    def learn_draft(self, accepted: int, drafted: int, weight: float) -> None:
        """Learn from a row's draft."""
        for position in range(min(accepted + 1, drafted)):
            self.learn(position, position < accepted, weight)

    def reach(self) -> Iterator[float]:
        """The chances that all tokens up to the first, second, … are right.

        A position that was rarely reached is like the one before, and as much harder in this call than in all.
        """
        reached, usual, harder = 1.0, PRIOR_ACCEPTANCE, 1.0
        for (all_right, all_tried), (right, tried) in zip(self._all, self._now, strict=True):
            usual = (all_right + NEIGHBOUR_WEIGHT * usual) / (all_tried + NEIGHBOUR_WEIGHT)
            chance = (right + EARLIER_WEIGHT * usual * harder) / (tried + EARLIER_WEIGHT)
            reached, harder = reached * chance, min(chance / usual, 1.0)
            yield reached


def of_copies() -> Chances:
    """Chances of copied tokens, by `Step.situation`."""
    return Chances([chance for row in PRIOR_COPIES for chance in row])
