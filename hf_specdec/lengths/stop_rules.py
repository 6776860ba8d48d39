"""Rules that end a round's drafting.

`auto_length` has the rule that adapts the length to times and acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_specdec.rules.round_statistics import Round


class StopRule:
    """Stop after a fixed number of tokens, the lookahead γ. Base class of the other rules.

    Args:
        limit: the most tokens to draft in a round.

    Attributes:
        reads_probabilities: whether `before_append` and `after_append` have to be called.
    """

    reads_probabilities = False

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def before_append(self, probs: Tensor) -> Tensor | None:
        """Which rows stop before their next drafted token, leaving it out.

        Args:
            probs: `[B, V]`, the draft's processed distribution for that token.

        Returns:
            `[B]` bool; None for no row.
        """
        return None

    def after_append(self, probs: Tensor) -> Tensor | None:
        """Which rows stop after their next drafted token, keeping it. Arguments and result as in `before_append`."""
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

    def __init__(self, limit: int, threshold: float) -> None:
        super().__init__(limit)
        self.threshold = threshold

    def before_append(self, probs: Tensor) -> Tensor:
        """See `StopRule.before_append`."""
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
    SCALE = 0.2

    def __init__(self, limit: int, threshold: float) -> None:
        super().__init__(limit)
        self.most_entropy = (1.0 - threshold) ** 2 / self.SCALE  # nats; at this entropy the bound equals the threshold

    def after_append(self, probs: Tensor) -> Tensor:
        """See `StopRule.after_append`."""
        return torch.special.entr(probs).sum(dim=-1) > self.most_entropy


class ConfidenceStop(StopRule):
    """Stop after a token at whose place the draft's highest probability is below a threshold.

    transformers' `assistant_confidence_threshold`; in sampling, it takes the probability of the drawn token.

    Args:
        limit: the most tokens to draft in a round.
        threshold: in [0, 1].
    """

    reads_probabilities = True

    def __init__(self, limit: int, threshold: float) -> None:
        super().__init__(limit)
        self.threshold = threshold

    def after_append(self, probs: Tensor) -> Tensor:
        """See `StopRule.after_append`."""
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

    def before_append(self, probs: Tensor) -> Tensor | None:
        """See `StopRule.before_append`."""
        return _any(rule.before_append(probs) for rule in self.rules)

    def after_append(self, probs: Tensor) -> Tensor | None:
        """See `StopRule.after_append`."""
        return _any(rule.after_append(probs) for rule in self.rules)

    def observe(self, finished: Round) -> None:
        """See `StopRule.observe`."""
        for rule in self.rules:
            rule.observe(finished)
        self.limit = min(rule.limit for rule in self.rules)


def _any(answers: Iterable[Tensor | None]) -> Tensor | None:
    """The rows that any of the rules stops."""
    given = [answer for answer in answers if answer is not None]
    return torch.stack(given).any(dim=0) if given else None
