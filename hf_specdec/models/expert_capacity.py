"""Experts that take only so many tokens of a pass and leave the others out (Switch Transformers, NLLB-MoE).

Tokens that are left out in a pass with drafts are not in plain decoding, which reads one token of each row at a time.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

FORESEEN = 4096  # tokens of a pass; a capacity beyond counts as unlimited


def most_drafts(model: PreTrainedModel, input_ids: Tensor) -> float:
    """The longest draft with which no expert leaves out a token; infinite where experts take all.

    Args:
        model: the target.
        input_ids: `[B, P]`, the prompts. In some versions rows share the capacity, so it is divided among them.

    Raises:
        ValueError: not even one drafted token fits in, or rows are left out for each other in plain decoding.
    """
    capacity, rows = most_tokens(model), len(input_ids)
    widest = max(2, input_ids.shape[1]) if rows > 1 else 2
    if rows * widest > capacity:
        raise ValueError(
            f"model={type(model).__name__} leaves tokens out if a pass has more than {capacity} of them, by its "
            f"configuration's expert_capacity, and the passes of {rows} rows with drafts have at least "
            f"{rows * widest}: pass fewer rows, raise it, or decode without speculation."
        )
    return capacity if math.isinf(capacity) else capacity // rows - 1


def most_tokens(model: PreTrainedModel) -> float:
    """How many tokens a pass may have so that no expert of a model leaves one out; infinite where experts take all."""
    return min((_most_tokens(part) for part in model.modules() if hasattr(part, "expert_capacity")), default=math.inf)


def _most_tokens(router: Module) -> float:
    """The same of one router, whose tokens may all want the same expert."""
    share: Any = getattr(router, "moe_eval_capacity_token_fraction", 0)
    if share <= 0 or router.training:
        return int(router.expert_capacity)  # type: ignore[arg-type]
    short = (tokens for tokens in range(1, FORESEEN) if math.ceil(share * tokens) < tokens)
    return next(short, math.inf) - 1
