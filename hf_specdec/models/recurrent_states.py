"""The states of a cache's recurrent layers, with those of the last tokens, so that these can be forgotten again.

There are two kinds: a convolution looks at the last few inputs, which are kept longer and cut; a recurrence holds one
state of the whole text, of which `recurrences` leaves one for each of a pass's last tokens, and one is picked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, cache_utils

from hf_specdec.models import recurrences

LINEAR_LAYERS: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())


def recurrent_layers(cache: object) -> list[Any]:
    """The layers of a cache that hold states of convolutions or recurrences."""
    return [layer for layer in getattr(cache, "layers", None) or () if isinstance(layer, LINEAR_LAYERS)]


def is_purely_recurrent(cache: object) -> bool:
    """Whether a cache holds such states and nothing else, so that it can't say how long its text is."""
    layers: list[Any] = getattr(cache, "layers", None) or []
    return bool(layers) and all(isinstance(layer, LINEAR_LAYERS) and not hasattr(layer, "keys") for layer in layers)


class RecurrentStates:
    """The states of a cache's recurrent layers.

    Args:
        cache: one whose recurrent layers record their past (`activate_past_recording`).
        places: the model's recurrences.

    Attributes:
        reach: how many of the last tokens can be forgotten.
        intact: whether the states of all rows are those of their texts.
    """

    def __init__(self, cache: Cache, places: recurrences.Places) -> None:
        self._places = places
        self._layers = recurrent_layers(cache)
        self._kept = [[state.clone()] for state in self._states()]  # by state: before and after each of the last tokens
        self.reach = 0
        self.intact = True
        self._heads = 1  # of a layer that have a recurrence each, as in Zamba

    @contextmanager
    def passing(self, width: int, last: int) -> Iterator[None]:
        """Around a pass over `width` tokens, of which at least the `last` can be forgotten afterwards.

        Raises:
            RuntimeError: a recurrence that is not known here has run.
        """
        before = self._states()
        parts = before if self._heads == 1 else [part for state in before for part in state.unbind(1)]
        recorder = recurrences.Recorder(parts, last)
        started = any(layer.has_previous_state[0] for layer in self._layers)
        intact, self.intact = self.intact, False  # until the pass has ended
        with recurrences.recording(recorder, self._places):
            yield
        states, left = self._states(), recorder.states
        if states and len(left) > len(states) and not len(left) % len(states):
            left = self._joined(left, len(left) // len(states))
        if width == 1 and before:
            left = [[state.clone()] for state in states]  # a single token's recurrence needs no recorder
        if len(left) != len(states):
            raise RuntimeError(
                f"{len(states)} recurrent states, {len(left)} of them seen in the making: the model computes them by "
                "functions that hf_specdec does not know, so decode without speculation."
            )
        seen = len(left[0]) if left else width
        if started and seen == width:
            self._kept = [[*old, *new] for old, new in zip(self._kept, left, strict=True)]
            self.reach += width
        else:
            self._kept = left
            self.reach = last
        self._cut_convolutions(lambda inputs, kernel: inputs[..., -(kernel + self.reach) :].contiguous())
        self.intact = intact

    def _joined(self, left: Sequence[Sequence[Tensor]], heads: int) -> list[list[Tensor]]:
        """The states after each token, by layer, from those `left` by each of its heads."""
        self._heads = heads
        layers = (left[at : at + heads] for at in range(0, len(left), heads))
        return [[torch.stack(by_head, dim=1) for by_head in zip(*layer, strict=True)] for layer in layers]

    def forget(self, counts: Sequence[int], rows: Sequence[int]) -> None:
        """Forget the last tokens of each row, `counts` `[B]`; those before can't be forgotten then.

        Args:
            counts: at most `reach`.
            rows: those in use; others may exceed `reach`, and their states then become invalid.
        """
        if max(counts[row] for row in rows) > self.reach:
            raise RuntimeError(f"{counts} tokens to forget, {self.reach} within reach")
        if max(counts) > self.reach:
            self.intact = False
            counts = [min(count, self.reach) for count in counts]
        self._kept = [[_picked(states, counts)] for states in self._kept]
        if any(counts):
            places = [(layer, at) for layer in self._layers for at in _running(layer)]
            for (layer, at), (state,) in zip(places, self._kept, strict=True):
                layer.recurrent_states[at] = state.clone()  # a single token's recurrence writes into it
        self._cut_convolutions(lambda inputs, kernel: _windows(inputs, counts, kernel))
        self.reach = 0

    def forget_all(self) -> None:
        """Empty the layers."""
        for layer in self._layers:
            layer.reset()
        self._cut_convolutions(lambda inputs, kernel: inputs.new_zeros(*inputs.shape[:-1], kernel))
        self._kept, self.reach = [], 0

    def _states(self) -> list[Tensor]:
        return [layer.recurrent_states[at] for layer in self._layers for at in _running(layer)]

    def _cut_convolutions(self, cut: Any) -> None:
        for layer in self._layers:
            for at, inputs in layer.conv_states.items():
                if inputs is not None:
                    layer.conv_states[at] = cut(inputs, layer.conv_kernel_size[at])


def _running(layer: Any) -> list[int]:
    """The numbers of a layer's recurrences that have a state."""
    return [at for at, made in layer.is_recurrent_states_initialized.items() if made and layer.has_previous_state[at]]


def _picked(states: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Of the states `[B, ...]` after each token, the one before each row's last `counts` tokens."""
    if min(counts) == max(counts):
        return states[-1 - counts[0]]
    return torch.cat([states[-1 - count][row : row + 1] for row, count in enumerate(counts)])


def _windows(inputs: Tensor, counts: Sequence[int], kernel: int) -> Tensor:
    """Of a convolution's inputs `[B, C, N]` the `kernel` before each row's last `counts`; zeros precede the first."""
    missing = kernel + max(counts) - inputs.shape[-1]
    if missing > 0:
        inputs = functional.pad(inputs, (missing, 0))
    end = inputs.shape[-1]
    if min(counts) == max(counts):
        return inputs[..., end - counts[0] - kernel : end - counts[0]].contiguous()
    windows = [inputs[row : row + 1, :, end - n - kernel : end - n] for row, n in enumerate(counts)]
    return torch.cat(windows)
