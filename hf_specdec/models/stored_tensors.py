"""The plain tensors that hold a model's weights in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PLAIN = (torch.nn.Parameter, torch.nn.Buffer, Tensor)


def stored_tensors(weight: Tensor) -> Iterator[Tensor]:
    """Yield a weight itself, or the tensors that make up a quantized one.

    Yields nothing for a subclass that does not name its parts (`__tensor_flatten__`).
    """
    if type(weight) in PLAIN:
        yield weight
    elif hasattr(weight, "__tensor_flatten__"):
        for name in weight.__tensor_flatten__()[0]:
            if (part := getattr(weight, name)) is not None:
                yield from stored_tensors(part)


def tensors_of(model: torch.nn.Module) -> list[Tensor]:
    """The plain tensors of all weights and buffers, in the same order as long as `fingerprint.forms_of` is the same."""
    return [
        part for held in (model.parameters(), model.buffers()) for weight in held for part in stored_tensors(weight)
    ]
