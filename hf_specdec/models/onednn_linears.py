"""Linear layers by oneDNN where it is faster than torch's own library for float32 products.

On x86 that library is MKL, which is optimized for Intel's processors. On AMD's it uses no AVX-512 and takes up to twice
as long as oneDNN. On both it takes twice as long for five tokens as for one, while oneDNN takes hardly longer. For
other dtypes torch uses oneDNN anyway, or oneDNN does not support them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.compat.torch_private import linear_pointwise
from hf_specdec.host.torch_state import FunctionMode
from hf_specdec.models.processor import reported

# Maps a model to the context manager for its passes.
Kernels = Callable[[PreTrainedModel], Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Range:
    """The sizes for which oneDNN is faster than the other library.

    Args:
        least_rows: with fewer rows, the other library is faster.
        most_rows: with more rows, it is faster too.
        least_weights: smaller layers fit into the processor's caches, where calling oneDNN costs more than it saves,
            unless a product has at least `least_products` multiplications.
    """

    least_rows: int
    most_rows: float
    least_weights: int
    least_products: float


MKL_ON_INTEL = Range(4, 15, 2**21, math.inf)
MKL_ELSEWHERE = Range(1, math.inf, 2**18, 2**22)
OTHERS = Range(1, 64, 2**18, math.inf)


@cache
def faster_range() -> Range:
    """The range for this processor and this build of torch."""
    if not torch.backends.mkl.is_available():
        return OTHERS
    return MKL_ON_INTEL if "GenuineIntel" in reported("vendor_id") else MKL_ELSEWHERE


class OneDnnLinears(FunctionMode):
    """While active in a thread, `torch.nn.functional.linear` uses oneDNN where that is faster."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not kwargs and _is_served(*args):
            return _linear(*args)
        return func(*args, **(kwargs or {}))


def onednn_linears(model: PreTrainedModel) -> Callable[[], AbstractContextManager[Any]]:
    """The context manager for a model's passes without gradients: `OneDnnLinears` if it applies to some weight."""
    served = linear_pointwise() is not None and any(
        _is_known(weight) and weight.numel() >= faster_range().least_weights for weight in model.parameters()
    )
    return OneDnnLinears if served else nullcontext


def _linear(tokens: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    operation = linear_pointwise()
    if torch.jit.is_tracing():
        # A trace cannot hold the other variant's arguments. Adding zeros takes up to a tenth more time.
        zeros = tokens.new_zeros(*tokens.shape[:-1], weight.shape[0])
        result: Tensor = operation.binary(tokens, zeros, weight, bias, "add")
    else:
        result = operation.default(tokens, weight, bias, "none", [], "")
    return result


def _is_served(tokens: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    if bias is not None and not bias.is_contiguous():  # oneDNN assumes that it is
        return False
    where, width = faster_range(), tokens.shape[-1]
    in_range = where.least_rows * width <= tokens.numel() <= where.most_rows * width
    if not (in_range and tokens.dtype is torch.float32 and torch.backends.mkldnn.enabled and _is_known(weight)):
        return False
    return weight.numel() >= where.least_weights or tokens.numel() * weight.shape[0] >= where.least_products


def _is_known(weight: Tensor) -> bool:
    plain = type(weight) in (torch.nn.Parameter, Tensor) and weight.dim() == 2
    return plain and weight.dtype is torch.float32 and weight.device.type == "cpu"
