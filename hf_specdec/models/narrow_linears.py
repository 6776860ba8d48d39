"""Linear layers over a few tokens through oneDNN, which reads large weights once for all of them.

On a CPU, torch hands float32 products to another library, on x86 to MKL, which takes twice as long for five rows as for
one. oneDNN takes hardly longer. For one row it is faster than MKL on AMD's processors and slower on Intel's, for which
MKL is made. Other dtypes go to oneDNN anyway, or are not known to it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_specdec.models.processor import reported


@dataclass(frozen=True)
class Range:
    """Where oneDNN is faster than the other library.

    Args:
        least_rows: with fewer, the other library is faster.
        most_rows: with more, too.
        least_weights: smaller layers stay in the processor's caches, where calling oneDNN costs more than it saves.
    """

    least_rows: int
    most_rows: int
    least_weights: int


OVER_MKL_ON_INTEL = Range(4, 15, 2**21)
ELSEWHERE = Range(1, 64, 2**18)


@cache
def faster_range() -> Range:
    """The range for this processor and this build of torch."""
    intel = "GenuineIntel" in reported("vendor_id")
    return OVER_MKL_ON_INTEL if torch.backends.mkl.is_available() and intel else ELSEWHERE


class NarrowLinears(TorchFunctionMode):
    """While active in a thread, `torch.nn.functional.linear` of few rows and a large weight runs in oneDNN."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not kwargs and _is_served(*args[:2]):
            bias = args[2] if len(args) > 2 else None
            return _linear(args[0], args[1], bias)
        return func(*args, **(kwargs or {}))


def narrow_linears(model: PreTrainedModel) -> Callable[[], AbstractContextManager[Any]]:
    """The context manager for a model's passes without gradients: `NarrowLinears` where it serves some weight."""
    served = _is_available() and any(_is_served_weight(weight) for weight in model.parameters())
    return NarrowLinears if served else nullcontext


def _linear(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # With a sum of zeros, since a trace can't hold the arguments of the variant without.
    zeros = tokens.new_zeros(*tokens.shape[:-1], weight.shape[0])
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(tokens, zeros, weight, bias, "add")
    return result


def _is_available() -> bool:
    """Whether this build of torch has the operation, which inductor uses and no documentation promises."""
    operation = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return torch.backends.mkldnn.is_available() and hasattr(operation, "binary")


def _is_served(tokens: Tensor, weight: Tensor) -> bool:
    where, width = faster_range(), tokens.shape[-1]
    few = where.least_rows * width <= tokens.numel() <= where.most_rows * width
    return few and tokens.dtype is torch.float32 and _is_served_weight(weight) and bool(torch.backends.mkldnn.enabled)


def _is_served_weight(weight: Tensor) -> bool:
    return (
        type(weight) in (torch.nn.Parameter, Tensor)
        and weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.numel() >= faster_range().least_weights
    )
