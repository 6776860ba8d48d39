"""The tensors that optimum-quanto's quantized weights consist of. Seen in optimum-quanto 0.2.7.

With other names in them, `AttributeError` is raised, and the weight is left to the library's own passes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def eight_bit_parts(weight: Any) -> tuple[Tensor, Tensor]:
    """Integers `[rows, columns]` and scales of a weight in 8 bits."""
    return weight._data, weight._scale


def packed_parts(weight: Any) -> tuple[int, Tensor, Tensor, Tensor]:
    """Bits per number, packed bytes, scales and shifts of a weight in 4 or 2 bits."""
    return weight._data._bits, weight._data._data, weight._scale, weight._shift
