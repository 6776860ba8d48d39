"""`GgufWeight`: a matrix that is multiplied from the blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdec.compat.torch_private import TO_COPY, linear_pointwise, without_torch_function, wrapper_tensor
from hf_specdec.models.onednn_linears import OneDnnLinears
from hf_specdec.prepared import few_token_products
from hf_specdec.prepared.compiled_step import compile_refusal
from hf_specdec.prepared.pass_kernels import kernels_loaded

PANEL = 2**20  # numbers of a matrix that are widened at a time for many tokens


class GgufWeight(Tensor):
    """A matrix `[N, K]` in blocks. Linear layers and embeddings read these; other operations need it widened.

    Args:
        blocks: `[N, K / numbers of a block, bytes of a block]` uint8, on the CPU.
        kind: the name of their type, such as Q4_0.
        dtype: the dtype of what it is multiplied with.
    """

    blocks: Tensor
    kind: str
    recordable = True  # products and embeddings call operations on `blocks`

    @staticmethod
    def __new__(cls, blocks: Tensor, kind: str, dtype: torch.dtype) -> GgufWeight:
        shape = (len(blocks), blocks.shape[1] * _numbers_of_block(kind))
        return cast(GgufWeight, wrapper_tensor(cls, shape, dtype, blocks.device))

    def __init__(self, blocks: Tensor, kind: str, dtype: torch.dtype) -> None:
        self.blocks, self.kind = blocks, kind

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GgufWeight({self.kind}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return ["blocks"], (self.kind, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], context: tuple[str, torch.dtype], size: Any, stride: Any
    ) -> GgufWeight:
        return GgufWeight(parts["blocks"], *context)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Products and embeddings are computed here."""
        ours = _OURS.get(func)
        if ours is not None:
            return ours(*args, **(kwargs or {}))
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Copies, also to another dtype."""
        aten, given, options = torch.ops.aten, args[0], kwargs or {}
        device = torch.device(options.get("device") or "cpu")
        if func is aten.detach.default:
            return cls(given.blocks, given.kind, given.dtype)
        if func is aten.clone.default:
            return cls(given.blocks.clone(), given.kind, given.dtype)
        if func is TO_COPY and device.type == "cpu":
            return cls(given.blocks, given.kind, options.get("dtype") or given.dtype)
        raise NotImplementedError(
            f"{func} is not supported for weights in a GGUF file, which only linear layers and embeddings read, on a "
            "CPU: call model.dequantize() first."
        )


def _linear(input: Tensor, weight: GgufWeight, bias: Tensor | None = None) -> Tensor:
    """As `functional.linear`. For many tokens the matrix is widened panel by panel."""
    if torch.is_grad_enabled() and input.requires_grad:
        return functional.linear(input, _dequantize(weight), bias)
    few = input.shape[:-1].numel() <= few_token_products.MOST_TOKENS
    if few and input.numel() and input.dim() <= few_token_products.MOST_DIMS and _has_kernels(input.dtype):
        product = few_token_products.kernel("gguf_linear", input.dtype)
        result: Tensor = product(input.contiguous(), weight.blocks, bias)
        return result
    rows = max(1, PANEL // weight.shape[1])
    if rows >= len(weight):
        return _product(input, _dequantize(weight).to(input.dtype), bias)
    output = input.new_empty(*input.shape[:-1], len(weight))
    for at in range(0, len(weight), rows):
        panel = _widened(weight, torch.arange(at, min(at + rows, len(weight)))).to(input.dtype)
        output[..., at : at + rows] = _product(input, panel)
    return output if bias is None else output.add_(bias)


def _product(input: Tensor, panel: Tensor, bias: Tensor | None = None) -> Tensor:
    if linear_pointwise() is None:
        return functional.linear(input, panel, bias)
    with OneDnnLinears():
        return functional.linear(input, panel, bias)


def _embedding(indices: Tensor, weight: GgufWeight, *args: Any, **kwargs: Any) -> Tensor:
    """As `functional.embedding`, ignoring `max_norm`."""
    return _widened(weight, indices.long())


def _dequantize(weight: GgufWeight) -> Tensor:
    return _widened(weight, torch.arange(len(weight)))


def _widened(weight: GgufWeight, indices: Tensor) -> Tensor:
    """Rows as numbers, by the kernels or, without them, by the package `gguf`."""
    if _has_kernels(weight.dtype):
        widen, like = (
            few_token_products.kernel("gguf_rows", weight.dtype),
            torch.empty(0, weight.shape[1], dtype=weight.dtype),
        )
        result: Tensor = widen(like, indices.contiguous(), weight.blocks)
        return result
    import gguf

    if torch.jit.is_tracing():
        raise NotImplementedError("the package gguf widens weights outside torch: a trace would keep them as constants")
    blocks = weight.blocks[indices].flatten(-2).numpy()
    numbers = gguf.dequantize(blocks, gguf.GGMLQuantizationType[weight.kind])
    return torch.from_numpy(numbers).to(weight.dtype)


_OURS: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    Tensor.dequantize: _dequantize,
}


def _has_kernels(dtype: torch.dtype) -> bool:
    able = few_token_products.supported() and compile_refusal(torch.device("cpu")) is None
    return able and kernels_loaded(dtype, "gguf")


@cache
def _numbers_of_block(kind: str) -> int:
    import gguf

    numbers: int = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    return numbers
