"""Relaxations of the target's scores: each lets a lossless rule accept more drafts than the target would."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Relaxation(Protocol):
    """Changes the target's processed scores so that the lossless rules accept more drafts.

    Attributes:
        serves_prepared_rounds: whether `relax` can be compiled: it consists of operations on tensors alone.
    """

    serves_prepared_rounds: bool

    def relax(self, scores: Tensor, draft_tokens: Tensor, lengths: Tensor, draft_probs: Tensor | None = None) -> Tensor:
        """Relax the scores of a round.

        Args:
            scores: `[B, γ+1, V]`, the target's processed scores.
            draft_tokens: `[B, γ]`.
            lengths: `[B]`, the number of drafted tokens per row.
            draft_probs: `[B, γ, V]`, the draft's processed distributions; None where drafts are point masses.

        Returns:
            `[B, γ+1, V]`, equal to `scores` where nothing was drafted.
        """


class CertainWhereKept(LogitsProcessor):
    """Base of the relaxations that judge each drafted token by the target's distribution alone.

    Where a token is kept, the scores are changed to give it probability 1; elsewhere they are unchanged. A lossless
    rule then accepts the kept tokens and replaces the first other one by the target's choice, in the same pass. Drafts
    count as point masses, so that in sampling a failed position is distributed as the target's own draw.

    In this package's loop, `relax` receives a whole round. As a `LogitsProcessor`, an instance only receives prefixes,
    so `hold` has to set the round's proposal first (batch size 1).
    """

    serves_prepared_rounds = True

    def __init__(self) -> None:
        self._start = 0
        self._tokens: list[int] = []

    def keeps(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Which drafted tokens to keep.

        Args:
            scores: `[B, γ, V]`, the target's processed scores.
            tokens: `[B, γ, 1]`, the drafted tokens.

        Returns:
            `[B, γ, 1]` bool.
        """
        raise NotImplementedError

    def relax(self, scores: Tensor, draft_tokens: Tensor, lengths: Tensor, draft_probs: Tensor | None = None) -> Tensor:
        """Scores `[B, γ+1, V]` that give each kept token probability 1; the others are unchanged."""
        lookahead = draft_tokens.shape[1]
        drafted, tokens = scores[:, :lookahead], draft_tokens.unsqueeze(2)
        kept = self.keeps(drafted, tokens) & is_drafted(lengths, lookahead)
        certain = drafted.gather(2, tokens).masked_fill(kept, 0.0)
        relaxed = scores.clone()
        relaxed[:, :lookahead].masked_fill_(kept, -torch.inf).scatter_(2, tokens, certain)
        return relaxed

    def hold(self, start: int, tokens: Sequence[int]) -> None:
        """Set the proposal: `tokens` drafted after a prefix of `start` tokens."""
        self._start, self._tokens = start, list(tokens)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Relax the scores `[1, V]` after the prefix `[1, n]`, if a token was drafted at that position."""
        position = input_ids.shape[1] - self._start
        if not 0 <= position < len(self._tokens):
            return scores
        token = torch.tensor([[self._tokens[position]]], device=scores.device)
        return self.relax(scores.unsqueeze(1), token, token.new_ones(1)).squeeze(1)


class BildRollback(CertainWhereKept):
    """BiLD's rollback (Kim et al. 2023, section 3.3): keep a drafted token x if -ln p_target(x) is small enough.

    Args:
        threshold: the largest distance at which a token is kept, nats; 0 is lossless.
        greedy: whether the target decodes greedily, where its argmax is always kept.
    """

    def __init__(self, threshold: float, *, greedy: bool) -> None:
        super().__init__()
        self.threshold = threshold
        self.greedy = greedy

    def keeps(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Tokens `[B, γ, 1]` within `threshold` nats of certainty; in greedy decoding also the target's own choice."""
        # Small differences from the largest score are exact, however large the scores are.
        below = scores - scores.amax(dim=2, keepdim=True)
        kept = below.logsumexp(dim=2, keepdim=True) - below.gather(2, tokens) <= self.threshold
        return kept | (scores.argmax(dim=2, keepdim=True) == tokens) if self.greedy else kept


class LenientArgmax(CertainWhereKept):
    """Lenience in greedy decoding (Leviathan et al. 2023, appendix A.5): keep x if p_target(x) > l · max p_target.

    In sampling, `rules.verification.Lenient` takes its place. The comparison is strict, so that with l = 1 a tie goes
    to the target's argmax.

    Args:
        lenience: l in [0, 1]; 1 is lossless, 0 keeps every token that the target does not rule out.
    """

    def __init__(self, lenience: float) -> None:
        super().__init__()
        self.lenience = lenience

    def keeps(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Tokens `[B, γ, 1]` more probable than `lenience` times the most probable one."""
        return scores.gather(2, tokens) > scores.amax(dim=2, keepdim=True) + _log(self.lenience)


class TypicalAcceptance(CertainWhereKept):
    """Typical acceptance (Cai et al. 2024, Medusa, section 2.3.1): keep x if p_target(x) > min(ε, δ exp(-H)).

    H is the entropy of p_target, in nats, and δ = √ε as in the paper's experiments. The paper takes the first token of
    each round from the target unconditionally; here that is the target's own token which ends the round before.

    Args:
        threshold: ε, at least 0. Infinity is lossless; 0 keeps every token that the target does not rule out.
    """

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def keeps(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Tokens `[B, γ, 1]` more probable than the smaller of ε and δ exp(-H)."""
        probs = scores.softmax(dim=2)
        entropy = torch.special.entr(probs).sum(dim=2, keepdim=True)
        return probs.gather(2, tokens) > (math.sqrt(self.threshold) * (-entropy).exp()).clamp(max=self.threshold)


class Ensemble:
    """Ensemble verification: judge drafts by w · target + (1 - w) · draft.

    Keeps the contract of transformers' `assistant_ensemble_weight`, which follows DIVERSE (arXiv 2604.07622): drafted
    positions are judged by the mixture, and the token after a whole draft stays the target's. w may be 0 or 1 here.

    Args:
        weight: w, the target's share in [0, 1]; 1 is lossless, 0 accepts every draft.
    """

    serves_prepared_rounds = True

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def relax(self, scores: Tensor, draft_tokens: Tensor, lengths: Tensor, draft_probs: Tensor | None = None) -> Tensor:
        """The mixture's scores `[B, γ+1, V]` at drafted positions; requires `draft_probs` `[B, γ, V]`."""
        assert draft_probs is not None
        drafted = scores[:, : draft_tokens.shape[1]]
        # Relative to the target's normaliser, so that w = 1 leaves the scores exactly as they are.
        draft = draft_probs.log() + drafted.logsumexp(dim=2, keepdim=True) + _log(1 - self.weight)
        mixed = torch.logaddexp(drafted + _log(self.weight), draft)
        judged = torch.where(is_drafted(lengths, draft_tokens.shape[1]), mixed, drafted)
        return torch.cat([judged, scores[:, draft_tokens.shape[1] :]], dim=1)


def is_drafted(lengths: Tensor, lookahead: int) -> Tensor:
    """`[B, γ, 1]`: whether the position holds one of the row's drafted tokens."""
    return (torch.arange(lookahead, device=lengths.device) < lengths.unsqueeze(1)).unsqueeze(2)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
