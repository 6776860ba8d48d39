"""The chances that drafted tokens are right, learned from the tokens that followed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hf_specdec.config import MAX_ASSISTANT_TOKENS

# In tokens: the weight of earlier calls in a new one, and of a position's chance in that of the next position. With
# more, drafts stay too long in a text harder than earlier ones; with less, bad luck shortens those of an easy text.
EARLIER_WEIGHT, NEIGHBOUR_WEIGHT = 5.0, 2.0
MOST_WEIGHT = 40.0  # of all tokens seen, so that newer ones outweigh older ones
DECAY = 0.95  # the factor on a round's weight with each later round
PRIOR_ACCEPTANCE = 0.75  # the chance of a model's token, before any is learned
# The same for copied tokens, as in the greedy answers of a small chat model. Columns: how many preceding tokens matched
# (1, 2, 3, 4 to 7, more). Rows: how often the copied token followed them: the only time, always, at least half of the
# time, less often.
PRIOR_COPIES = (
    (0.3, 0.5, 0.65, 0.75, 0.92),
    (0.5, 0.75, 0.8, 0.87, 0.94),
    (0.2, 0.35, 0.35, 0.4, 0.5),
    (0.13, 0.15, 0.25, 0.25, 0.3),
)


class Step(NamedTuple):
    """One token of a copy.

    Args:
        token: the most frequent continuation, the latest one of equally frequent ones.
        length: the number of preceding tokens that matched.
        seen, total: how often it followed them, and how often any token did.
    """

    token: int
    length: int
    seen: int
    total: int

    @property
    def situation(self) -> int:
        """Its index in `PRIOR_COPIES`, counted row by row."""
        followed = int(self.total > 1) if self.seen == self.total else 2 if 2 * self.seen >= self.total else 3
        return 5 * followed + (self.length - 1 if self.length < 4 else 3 if self.length < 8 else 4)


class Chances:
    """Chances that tokens are right, by situation: over all calls, and in this call, which starts from those.

    Args:
        prior: the chances before any token is seen.
        weight: how many tokens the prior counts as.
    """

    def __init__(self, prior: Sequence[float], weight: float = EARLIER_WEIGHT) -> None:
        self._all = [[weight * chance, weight] for chance in prior]
        self.begin()

    def begin(self) -> None:
        """Start a call."""
        self._now = [[0.0, 0.0] for _ in self._all]

    def learn(self, situation: int, is_right: bool, weight: float = 1.0) -> None:
        """Learn whether a token was right; with n rows, each one's tokens weigh 1 / n."""
        for counts in (self._all[situation], self._now[situation]):
            kept = min(1.0, (MOST_WEIGHT - weight) / counts[1]) if counts[1] else 0.0
            counts[:] = kept * counts[0] + weight * is_right, kept * counts[1] + weight

    def __getitem__(self, situation: int) -> float:
        (usual, all_tried), (right, tried) = self._all[situation], self._now[situation]
        return (right + EARLIER_WEIGHT * usual / all_tried) / (tried + EARLIER_WEIGHT)


class DraftChances(Chances):
    """Chances of a model's tokens by position in the draft, given that all tokens before are right."""

    def __init__(self) -> None:
        super().__init__([0.0] * MAX_ASSISTANT_TOKENS, 0.0)

    def fade(self) -> None:
        """Reduce the weight of earlier rounds of this call."""
        self._now = [[DECAY * right, DECAY * tried] for right, tried in self._now]

    def learn_draft(self, accepted: int, drafted: int, weight: float) -> None:
        """Learn from a row's draft, of which the first `accepted` of `drafted` tokens were accepted."""
        for position in range(min(accepted + 1, drafted)):
            self.learn(position, position < accepted, weight)

    def reach(self) -> Iterator[float]:
        """The chances that the first token, the first two, … are all right.

        A rarely reached position takes over the chance of the one before, and how much harder this call is than others.
        """
        reached, usual, harder = 1.0, PRIOR_ACCEPTANCE, 1.0
        for (all_right, all_tried), (right, tried) in zip(self._all, self._now, strict=True):
            usual = (all_right + NEIGHBOUR_WEIGHT * usual) / (all_tried + NEIGHBOUR_WEIGHT)
            chance = (right + EARLIER_WEIGHT * usual * harder) / (tried + EARLIER_WEIGHT)
            reached, harder = reached * chance, min(chance / usual, 1.0)
            yield reached


def of_copies() -> Chances:
    """New chances of copied tokens, by `Step.situation`."""
    return Chances([chance for row in PRIOR_COPIES for chance in row])
