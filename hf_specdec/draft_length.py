"""When drafting stops: rules that are asked before a drafted token is appended. No clocks, no models."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdec.stats import Round


class StopRule:
    """Drafts `limit` tokens a round, no matter what: the fixed lookahead γ, and the base of the other rules.

    Args:
        limit: the most tokens to draft in a round.
    """

    reads_probabilities = False

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def before_append(self, probs: Tensor) -> Tensor:
        """Which rows stop before their next drafted token is appended.

        Asked only where `reads_probabilities`.

        Args:
            probs: `[B, V]`, the draft's processed distribution of that token.

        Returns:
            `[B]` bool.
        """
        return torch.zeros(len(probs), dtype=torch.bool, device=probs.device)

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
