"""The distance of a draft from its target: pure functions of distributions, one value per position, in nats.

Distributions come as log-probabilities `[N, M]` over the same M outcomes: all V tokens, or K tokens and the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_ETA = 3.0  # how quickly `lk_hybrid` leaves KL as acceptance rises


def cross_entropy(draft: Tensor, tokens: Tensor) -> Tensor:
    """-ln q(token) on the target's own tokens: the prediction alignment of BiLD (Kim et al. 2023).

    Args:
        draft: log-probabilities of the draft, `[N, V]`.
        tokens: the target's token at each position, `[N]`.

    Returns:
        `[N]`, in nats.
    """
    return -draft.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def forward_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(p‖q) = Σ p (ln p - ln q) `[N]` of log-probabilities `[N, M]`, p the target's, q the draft's.

    Only over outcomes that the draft can produce: a trimmed head excludes the others, whatever it learns.
    """
    target = target.masked_fill(draft.isneginf(), -torch.inf).log_softmax(-1)
    terms = target.exp() * (target - draft)
    # Outcomes of probability 0 count nothing, but 0 · ln 0 is nan.
    return terms.masked_fill(target.isneginf(), 0.0).sum(-1)


def reverse_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(q‖p) = Σ q (ln q - ln p) `[N]` of log-probabilities `[N, M]`, p the target's, q the draft's."""
    return (draft.exp() * (draft - target)).sum(-1)


def total_variation(draft: Tensor, target: Tensor) -> Tensor:
    """½ Σ |p - q| `[N]` of log-probabilities `[N, M]`, a probability rather than nats.

    In sampling it is the chance that a drafted token is rejected (Leviathan et al. 2023, theorem 3.5).
    """
    return (target.exp() - draft.exp()).abs().sum(-1) / 2


def lk_hybrid(draft: Tensor, target: Tensor) -> Tensor:
    """λ KL(p‖q) + (1 - λ) TV(p, q) `[N]` of log-probabilities `[N, M]`, where λ = exp(-3 ᾱ) (arXiv 2602.23881).

    ᾱ is the mean of 1 - TV over the N positions. Far from the target, where the gradient of TV is weak, the loss is
    nearly KL; with rising acceptance it approaches TV, the rejection probability.
    """
    apart = total_variation(draft, target)
    share = torch.exp(-_ETA * (1 - apart.detach().mean()))
    return share * forward_kl(draft, target) + (1 - share) * apart


# The losses of DistillSpec (Zhou et al. 2023) and one for acceptance. They compare whole distributions.
DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "lk_hybrid": lk_hybrid,
}
LOSSES = ("cross_entropy", *DIVERGENCES)


def on_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """The distribution over K given tokens, with all other tokens as one further outcome.

    A divergence of two such distributions is at most that of the full ones (data processing inequality), and equal
    to it if K = V. The mass of the rest is summed over its logits, not computed as 1 minus the others, so that it is
    exact even if tiny.

    Args:
        logits: `[N, V]`.
        tokens: `[N, K]`, different ones in each row; those outside the vocabulary have probability 0.

    Returns:
        Log-probabilities `[N, K + 1]`, the rest last; `[N, V]` in the order of `tokens` if K = V.
    """
    vocabulary = logits.shape[-1]
    if bool((tokens >= vocabulary).any()):
        logits = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        tokens = tokens.clamp(max=vocabulary)
    everything = logits.logsumexp(-1, keepdim=True)
    kept = logits.gather(-1, tokens) - everything
    if tokens.shape[-1] == logits.shape[-1]:
        return kept
    rest = logits.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True) - everything
    return torch.cat([kept, rest], dim=-1)
