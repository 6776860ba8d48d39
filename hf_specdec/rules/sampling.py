"""From scores to probabilities, and draws from them: the one place where randomness lives."""

from __future__ import annotations

import torch
from torch import Tensor


def probabilities(scores: Tensor) -> Tensor:
    """Softmax of processed scores `[..., V]`, as `transformers`' `_sample` takes it."""
    return torch.softmax(scores, dim=-1)


def uniforms(*shape: int, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1) from torch's global generator, so that `transformers.set_seed` rules them."""
    return torch.rand(shape, device=device)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token from each distribution by inverting its cumulative sum.

    Args:
        weights: `[..., V]`, not negative, not all zero; need not sum to one.
        uniform: `[...]`, in [0, 1).

    Returns:
        Tokens `[...]`. A token of weight zero is never drawn: the sum is taken in float64, where
        `uniform * total` stays below `total` for every float32 number below one.
    """
    # Apple's GPUs have no float64; there a draw can hit the total, hence the bound.
    on_mps = weights.device.type == "mps"
    cumulative = weights.cumsum(dim=-1, dtype=torch.float32 if on_mps else torch.float64)
    threshold = cumulative[..., -1:] * uniform.unsqueeze(-1)
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return tokens.clamp_(max=weights.shape[-1] - 1) if on_mps else tokens
