"""Experts with a limited capacity, which leave out further tokens of a pass (Switch Transformers, NLLB-MoE).

A pass with drafts may leave out tokens that plain decoding, which reads one token per row at a time, does not.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

FORESEEN = 4096  # tokens of a pass; a larger capacity counts as unlimited


def most_drafts(model: PreTrainedModel, input_ids: Tensor) -> float:
    """The longest draft with which no expert leaves out a token; infinite if experts have no limit.

    Args:
        model: the target.
        input_ids: `[B, P]`, the prompts. In some versions rows share the capacity, so it is divided among them.

    Raises:
        ValueError: not even one drafted token fits, or rows displace each other in plain decoding.
    """
    capacity, rows = most_tokens(model), len(input_ids)
    widest = max(2, input_ids.shape[1]) if rows > 1 else 2
    if rows * widest > capacity:
        raise ValueError(
            f"model={type(model).__name__} drops tokens in passes over more than {capacity} "
            f"(expert_capacity in its configuration), and passes over {rows} rows with drafts have at least "
            f"{rows * widest}: pass fewer rows, raise it, or decode without speculation."
        )
    return capacity if math.isinf(capacity) else capacity // rows - 1


def most_tokens(model: PreTrainedModel) -> float:
    """The most tokens of a pass with which no expert leaves one out; infinite if experts have no limit."""
    return min((_most_tokens(part) for part in model.modules() if hasattr(part, "expert_capacity")), default=math.inf)


def _most_tokens(router: Module) -> float:
    """The same for one router, if all tokens choose the same expert."""
    share: Any = getattr(router, "moe_eval_capacity_token_fraction", 0)
    if share <= 0 or router.training:
        return int(router.expert_capacity)  # type: ignore[arg-type]
    short = (tokens for tokens in range(1, FORESEEN) if math.ceil(share * tokens) < tokens)
    return next(short, math.inf) - 1
