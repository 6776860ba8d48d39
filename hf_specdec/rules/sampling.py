"""Probabilities from scores, and draws from them. All randomness of the package comes from here."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdec.rules.shared_decisions import shared


def probabilities(scores: Tensor) -> Tensor:
    """Softmax of processed scores `[..., V]`, as in `GenerationMixin._sample`."""
    return torch.softmax(scores, dim=-1)


def uniforms(*shape: int, device: torch.device) -> Tensor:
    """Uniform float32 numbers in [0, 1) from torch's global generator, which `transformers.set_seed` seeds.

    The dtype is fixed: bfloat16, a possible default dtype, has only 256 such numbers. Processes that share one model
    get the first one's numbers.
    """
    return shared(torch.rand(shape, device=device, dtype=torch.float32))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token from each distribution by inverting its cumulative sum.

    Args:
        weights: `[..., V]`, non-negative; they need not sum to one.
        uniform: `[...]`, in [0, 1).

    Returns:
        Tokens `[...]`; -1 where the weights hold NaN or infinity or are all zero. A token of weight zero is never
        drawn: the sum is taken in float64, where `uniform * total < total` for every float32 number below one.
    """
    # Apple's GPUs have no float64, so a draw can reach the total and is clamped.
    on_mps = weights.device.type == "mps"
    cumulative = weights.cumsum(dim=-1, dtype=torch.float32 if on_mps else torch.float64)
    total = cumulative[..., -1]
    tokens = torch.searchsorted(cumulative, (total * uniform).unsqueeze(-1), right=True).squeeze(-1)
    if on_mps:
        tokens = tokens.clamp_(max=weights.shape[-1] - 1)
    return tokens.masked_fill(~((total > 0) & total.isfinite()), -1)
