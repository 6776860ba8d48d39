"""Logits processors and criteria that keep state, and a journal of what they are asked."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria


class Journaled(LogitsProcessor):
    """Writes down every text that it sees.

    Args:
        journal: what is asked, in order; shared with others to see in which order they are asked.
    """

    def __init__(self, journal: list[Any] | None = None) -> None:
        self.journal = [] if journal is None else journal

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.journal.append((type(self).__name__, ids.tolist()))
        return self.process(ids, scores)

    def process(self, ids: Tensor, scores: Tensor) -> Tensor:
        """The processed scores."""
        raise NotImplementedError


class Counter(Journaled):
    """Prefers another residue class of tokens at each call."""

    calls = 0

    def process(self, ids: Tensor, scores: Tensor) -> Tensor:
        """See `Journaled.process`."""
        self.calls += 1
        favoured = torch.arange(scores.shape[1]) % 3 == self.calls % 3
        return scores + 1.5 * favoured


class Automaton(Journaled):
    """Each row is in a state that follows from its last token; asserts that its texts grow token by token.

    Tokens of the state's parity are preferred. In place, as many write into the scores that they are given.
    """

    def __init__(self, journal: list[Any] | None = None) -> None:
        super().__init__(journal)
        self.states: list[int] = []
        self.texts: list[list[int]] = []

    def process(self, ids: Tensor, scores: Tensor) -> Tensor:
        """See `Journaled.process`."""
        texts = ids.tolist()
        if not self.texts:
            self.states = [0] * len(texts)
        else:
            assert [text[:-1] for text in texts] == self.texts, "called out of order"
            self.states = [(2 * state + text[-1]) % 5 for state, text in zip(self.states, texts, strict=True)]
        self.texts = texts
        for row, state in enumerate(self.states):
            scores[row, state % 2 :: 2] += 2.0
        return scores


class Budget(Journaled):
    """A thinking budget: once a row has written so many tokens without the end of its thought, it is forced.

    Args:
        tokens: the budget of a row.
        end: the token that ends a thought.
    """

    def __init__(self, journal: list[Any] | None = None, tokens: int = 6, end: int = 7) -> None:
        super().__init__(journal)
        self.tokens, self.end = tokens, end
        self.left: list[int] = []

    def process(self, ids: Tensor, scores: Tensor) -> Tensor:
        """See `Journaled.process`."""
        if not self.left:
            self.left = [self.tokens] * len(ids)
        for row, last in enumerate(ids[:, -1].tolist()):
            self.left[row] = -1 if last == self.end else self.left[row] - 1
            if self.left[row] == 0:
                scores[row] = -torch.inf
                scores[row, self.end] = 0.0
        return scores


class ForkableAutomaton(Automaton):
    """An automaton that drafts may pass through, by forks of it."""

    forks = 0

    def fork(self) -> ForkableAutomaton:
        """An independent copy in the same state."""
        self.forks += 1
        twin = copy.copy(self)
        twin.states, twin.journal = list(self.states), []
        return twin


class SharedAutomaton(ForkableAutomaton):
    """A control: its forks are the automaton itself."""

    def fork(self) -> SharedAutomaton:
        """No copy."""
        return self


class StopsByCount(StoppingCriteria):
    """Ends each row after a number of columns that depends on its first new token, and counts them itself."""

    def __init__(self, journal: list[Any]) -> None:
        self.journal, self.calls = journal, 0

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if not self.calls:
            self.ends = 4 + ids[:, -1] % 9
        self.calls += 1
        self.journal.append((type(self).__name__, ids.tolist()))
        return self.calls >= self.ends


PROCESSORS: dict[str, type[Journaled]] = {
    "counter": Counter, "automaton": Automaton, "budget": Budget, "forkable automaton": ForkableAutomaton,
}  # fmt: skip
