"""Rules that end a round's drafting; the one that adapts to times and acceptance is in `auto_length`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hf_specdec.rules.round_statistics import Round


class StopRule:
    """Stop after a fixed number of tokens, the lookahead γ. Base class of the other rules.

    Args:
        limit: the most tokens to draft in a round.

    Attributes:
        reads_probabilities: whether `before_append` and `after_append` must be called.
        serves_prepared_rounds: whether the rule can be compiled: its limit is known before a round, and its answers are
            operations on the probabilities alone. Each subclass must set this itself.
    """

    reads_probabilities = False
    serves_prepared_rounds: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.serves_prepared_rounds = vars(cls).get("serves_prepared_rounds", False)

    def __init__(self, limit: int) -> None:
        self.limit = limit

    @property
    def longest(self) -> int:
        """The most tokens that a round of this call may draft."""
        return self.limit

    def while_drafting(self) -> StopRule | None:
        """The part that decides by probabilities during drafting; None if the limit alone ends drafts."""
        return self if self.reads_probabilities else None

    def use_prepared(self, is_ready: Callable[[int], bool]) -> None:
        """Choose limits for rounds that are compiled or captured. Call this before the first round.

        Args:
            is_ready: whether rounds of a lookahead are prepared already; asked before each round.
        """

    def use_general(self) -> None:
        """Choose limits for general rounds again, after preparing has failed."""

    def before_append(self, probs: Tensor) -> Tensor | None:
        """The rows that stop before their next drafted token, leaving it out.

        Args:
            probs: `[B, V]`, the draft's processed distribution for that token.

        Returns:
            `[B]` bool; None if no row stops.
        """
        return None

    def after_append(self, probs: Tensor) -> Tensor | None:
        """The rows that stop after their next drafted token, keeping it. See `before_append`."""
        return None

    def observe(self, finished: Round) -> None:
        """Learn from a finished round."""


class Fallback(StopRule):
    """BiLD's fallback (Kim et al. 2023, section 3.2): stop before a token that the draft is not confident in.

    Args:
        limit: the most tokens to draft in a round.
        threshold: a row stops if the highest probability for its next token is below it.
    """

    reads_probabilities = True
    serves_prepared_rounds = True

    def __init__(self, limit: int, threshold: float) -> None:
        super().__init__(limit)
        self.threshold = threshold

    def before_append(self, probs: Tensor) -> Tensor:
        """Rows `[B]` whose most probable next token is below the threshold."""
        return probs.amax(dim=-1) < self.threshold


class EntropyStop(StopRule):
    """Stop after a token whose lower bound on the acceptance probability, 1 - sqrt(c H), is below a threshold.

    H is the entropy of the draft's distribution. AdaEDL (Agrawal et al. 2024, arXiv 2410.18351, c = 0.2) and SVIP
    (Zhang et al. 2024, arXiv 2411.18462) derive such bounds from Pinsker's inequality. The uncertain token itself is
    drafted: its draft step has already run, and verifying one more token costs little.

    Args:
        limit: the most tokens to draft in a round.
        threshold: in [0, 1]; with 1, drafting continues only while the draft is certain.
    """

    reads_probabilities = True
    serves_prepared_rounds = True
    SCALE = 0.2

    def __init__(self, limit: int, threshold: float) -> None:
        super().__init__(limit)
        self.most_entropy = (1.0 - threshold) ** 2 / self.SCALE  # nats; at this entropy the bound equals the threshold

    def after_append(self, probs: Tensor) -> Tensor:
        """Rows `[B]` whose draft distribution has more than `most_entropy` nats."""
        return torch.special.entr(probs).sum(dim=-1) > self.most_entropy


class ConfidenceStop(StopRule):
    """Stop after a token for which the draft's highest probability is below a threshold.

    As transformers' `assistant_confidence_threshold`, which uses the drawn token's probability in sampling.

    Args:
        limit: the most tokens to draft in a round.
        threshold: in [0, 1].
    """

    reads_probabilities = True
    serves_prepared_rounds = True

    def __init__(self, limit: int, threshold: float) -> None:
        super().__init__(limit)
        self.threshold = threshold

    def after_append(self, probs: Tensor) -> Tensor:
        """Rows `[B]` whose most probable next token is below the threshold."""
        return probs.amax(dim=-1) < self.threshold


class FirstOf(StopRule):
    """Stop as soon as any of several rules does.

    Args:
        rules: the rules to combine.
    """

    def __init__(self, *rules: StopRule) -> None:
        super().__init__(min(rule.limit for rule in rules))
        self.rules = rules
        self.reads_probabilities = any(rule.reads_probabilities for rule in rules)
        self.serves_prepared_rounds = all(rule.serves_prepared_rounds for rule in rules)

    @property
    def longest(self) -> int:
        """The shortest of the rules' longest drafts."""
        return min(rule.longest for rule in self.rules)

    def while_drafting(self) -> StopRule | None:
        """The rules that read probabilities, as one rule; None if there are none."""
        parts = [part for rule in self.rules if (part := rule.while_drafting()) is not None]
        return FirstOf(*parts) if len(parts) > 1 else next(iter(parts), None)

    def use_prepared(self, is_ready: Callable[[int], bool]) -> None:
        """Call it on every rule, and take the smallest limit."""
        for rule in self.rules:
            rule.use_prepared(is_ready)
        self.limit = min(rule.limit for rule in self.rules)

    def use_general(self) -> None:
        """Call it on every rule."""
        for rule in self.rules:
            rule.use_general()

    def before_append(self, probs: Tensor) -> Tensor | None:
        """Rows `[B]` that any rule stops before their next token."""
        return _any(rule.before_append(probs) for rule in self.rules)

    def after_append(self, probs: Tensor) -> Tensor | None:
        """Rows `[B]` that any rule stops after their next token."""
        return _any(rule.after_append(probs) for rule in self.rules)

    def observe(self, finished: Round) -> None:
        """Let every rule learn from a round, and take the smallest limit."""
        for rule in self.rules:
            rule.observe(finished)
        self.limit = min(rule.limit for rule in self.rules)


def _any(answers: Iterable[Tensor | None]) -> Tensor | None:
    """The rows that any of the rules stops."""
    given = [answer for answer in answers if answer is not None]
    return torch.stack(given).any(dim=0) if given else None
