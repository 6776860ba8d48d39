"""The parts of quantized weights, for kernels that read them in place.

Quantization libraries are not imported: a weight is recognized by the name of its class, and left to its own library if
its parts are not as expected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.compat.quanto_private import eight_bit_parts, packed_parts


@dataclass(frozen=True)
class QuantizedParts:
    """A matrix `[N, K]` of numbers q with the values `scale * q - shift`.

    Args:
        values: `[N, K]` int8, or `[N / 2, K]` uint8, whose low halves are the first N / 2 rows and whose high halves
            are the others.
        scale: `[N, G]`, one for each group of a row's columns.
        shift: `[N, G]`, None for 0; for int8 in units of the scale.
    """

    values: Tensor
    scale: Tensor
    shift: Tensor | None


def parts_of(weight: Tensor) -> QuantizedParts | None:
    """The parts of a quantized weight, which share its memory; None if the kernel cannot read it."""
    kind = type(weight)
    read = _READERS.get((kind.__module__.partition(".")[0], kind.__name__))
    try:
        parts = None if read is None else read(weight)
    except AttributeError:  # another version of the library
        return None
    return parts if parts is not None and _readable(parts, weight) else None


def _quanto_bytes(weight: Any) -> QuantizedParts | None:
    numbers, scale = eight_bit_parts(weight)
    if numbers.dtype != torch.int8 or weight.axis != 0 or scale.numel() != len(weight):
        return None
    return QuantizedParts(numbers, scale.reshape(-1, 1), None)


def _quanto_bits(weight: Any) -> QuantizedParts | None:
    """Parts of int4 weights: groups of columns are stored as rows, the second half of them in the high half-bytes."""
    bits, packed, scale, shift = packed_parts(weight)
    if bits != 4 or weight.axis != 0 or len(weight) % 2:
        return None
    rows = len(weight)
    return QuantizedParts(packed.reshape(rows // 2, -1), scale.reshape(rows, -1), shift.reshape(rows, -1))


def _torchao(weight: Any) -> QuantizedParts | None:
    """Parts of torchao's weights; those of fewer than 8 bits are also stored in 8."""
    activations = ("activation_quantization", "act_quant_kwargs", "act_quant_scale", "act_pre_scale")
    shift = weight.zero_point
    if any(getattr(weight, name, None) is not None for name in activations) or (
        shift is not None and shift.dtype != torch.int8
    ):
        return None
    return QuantizedParts(weight.qdata, weight.scale, shift)


_READERS: dict[tuple[str, str], Callable[[Any], QuantizedParts | None]] = {
    ("optimum", "WeightQBytesTensor"): _quanto_bytes,
    ("optimum", "WeightQBitsTensor"): _quanto_bits,
    ("torchao", "Int8Tensor"): _torchao,
    ("torchao", "IntxUnpackedToInt8Tensor"): _torchao,
}


def _readable(parts: QuantizedParts, weight: Tensor) -> bool:
    values, scale, shift = parts.values, parts.scale, parts.shift
    if weight.dim() != 2 or scale.dim() != 2:
        return False
    rows, columns = weight.shape
    stored = {torch.int8: rows, torch.uint8: rows / 2}.get(values.dtype)
    return (
        values.shape == (stored, columns)
        and len(scale) == rows
        and columns % scale.shape[1] == 0
        and scale.dtype == weight.dtype
        and (shift is None or (shift.shape == scale.shape and shift.dtype in (torch.int8, scale.dtype)))
        and all(part.is_contiguous() for part in (values, scale, shift) if part is not None)
    )
