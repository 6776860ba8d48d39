"""The parts of optimum-quanto's quantized weights, and its C++ extension. Seen in optimum-quanto 0.2.7."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor


def eight_bit_parts(weight: Any) -> tuple[Tensor, Tensor]:
    """The integers `[rows, columns]` and scales of an 8-bit weight.

    Raises:
        AttributeError: they have other names; the weight is left to the library's own passes.
    """
    return weight._data, weight._scale


def packed_parts(weight: Any) -> tuple[int, Tensor, Tensor, Tensor]:
    """The bits per number, packed bytes, scales and shifts of a 4-bit or 2-bit weight.

    Raises:
        AttributeError: as `eight_bit_parts`.
    """
    return weight._data._bits, weight._data._data, weight._scale, weight._shift


def replace_extension(**functions: Callable[..., Tensor]) -> None:
    """Use Python functions in place of the extension for CPUs, unless it is loaded already.

    Without the attribute, the library compiles its extension as usual.
    """
    from optimum.quanto.library.extensions import get_extension

    extension = get_extension("quanto_cpp")
    if getattr(extension, "_lib", extension) is None:
        extension._lib = SimpleNamespace(**functions)
