"""When drafting stops: rules that are asked before a drafted token is drawn. No clocks, no models.

The length that adapts to times and acceptance is in `auto_length`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_specdec.rules.statistics import Round


class StopRule:
    """Drafts `limit` tokens a round, no matter what: the fixed lookahead γ, and the base of the other rules.

    Args:
        limit: the most tokens to draft in a round.
    """

    reads_probabilities = False

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def before_append(self, probs: Tensor) -> Tensor | None:
        """Which rows stop before their next drafted token is appended; both questions only where `reads_probabilities`.

        Args:
            probs: `[B, V]`, the draft's processed distribution of that token.

        Returns:
            `[B]` bool; None: no row.
        """
        return None

    def after_append(self, probs: Tensor) -> Tensor | None:
        """Which rows stop behind that token, which is still appended; as `before_append`, from its distribution."""
        return None

    def observe(self, finished: Round) -> None:
        """Learn from a finished round."""


class Fallback(StopRule):
    """BiLD's fallback (Kim et al. 2023, section 3.2): stop where the draft is not confident.

    Args:
        limit: the most tokens to draft in a round.
        threshold: a row stops where its next distribution's maximum is below it.
    """

    reads_probabilities = True

    def __init__(self, limit: int, threshold: float) -> None:
        super().__init__(limit)
        self.threshold = threshold

    def before_append(self, probs: Tensor) -> Tensor:
        """See `StopRule.before_append`."""
        return probs.amax(dim=-1) < self.threshold


class EntropyStop(StopRule):
    """Stop where the draft's entropy H bounds acceptance badly: 1 - sqrt(c H) below a threshold.

    AdaEDL (Agrawal et al. 2024, arXiv 2410.18351, c = 0.2) and SVIP (Zhang et al. 2024, arXiv 2411.18462) derive
    such bounds from Pinsker's inequality. No training, no memory. The unsure token itself is drafted: its pass is
    paid for, and verifying one token more costs next to nothing.

    Args:
        limit: the most tokens to draft in a round.
        threshold: in [0, 1]; 1 goes on only where the draft is certain.
    """

    reads_probabilities = True
    SCALE = 0.2

    def __init__(self, limit: int, threshold: float) -> None:
        super().__init__(limit)
        self.most_entropy = (1.0 - threshold) ** 2 / self.SCALE  # nats, at which the bound is the threshold

    def after_append(self, probs: Tensor) -> Tensor:
        """See `StopRule.after_append`."""
        return torch.special.entr(probs).sum(dim=-1) > self.most_entropy


class FirstOf(StopRule):
    """Stops as soon as one of several rules does.

    Args:
        rules: asked in every round, each told of every round.
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
    """Rows that any rule stops."""
    given = [answer for answer in answers if answer is not None]
    return torch.stack(given).any(dim=0) if given else None
