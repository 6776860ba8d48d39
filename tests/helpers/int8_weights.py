"""Weights as a tensor class of their own, which is how torchao quantizes: int8 values and a scale for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter


class Int8Weight(Tensor):
    """A weight `[out, in]` that exists only rounded, and that `linear` unpacks."""

    values: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scales: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scales.dtype, device=values.device)

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self.values, self.scales = values, scales

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """The nearest int8 weight."""
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Int8Weight(shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            inputs, weight, *bias = args
            return func(inputs, weight.values.to(weight.dtype) * weight.scales, *bias, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scales)
        raise NotImplementedError(f"{func} of an Int8Weight")


def quantize(model: Module) -> None:
    """Replace the weights of a model's linear layers, its head aside."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name != "lm_head":
            module.weight = Parameter(Int8Weight.of(module.weight.detach()), requires_grad=False)
