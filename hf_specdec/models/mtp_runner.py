"""Passes of a target's own multi-token-prediction layers over rows of different lengths.

Layer k reads, for each place s of the text, the hidden state before it (the target's at s, or what layer k - 1 made of
that) and the token at s + k + 1, and its last state gives the token at s + k + 2. The last layer goes on by itself:
it reads its own last state and the token that came of it. Every layer keeps the keys and values of place s in slot s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.compat import mtp_private
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.masks import SlotMasks, attention_windows, check_attention
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.per_target import PerTarget
from hf_specdec.models.states_runner import StatesRunner
from hf_specdec.models.traits import on_device

_loaded: PerTarget[Any] = PerTarget()


def mtp_layers(model: PreTrainedModel) -> Any:
    """A target's multi-token-prediction layers, loaded once from its checkpoint.

    Raises:
        ValueError: transformers is too old, or there are none, or none that can be run here; the message says which.
    """
    named = f"drafter='mtp' with model={type(model).__name__}"
    mtp_private.check_version(named)
    count = mtp_private.layer_count(model)
    if not count:
        raise ValueError(
            f"{named}: its configuration has no num_mtp_layers, so it brings no multi-token-prediction layers "
            "along: choose another drafter, or a checkpoint with such layers."
        )
    try:
        layers = _loaded.of(model, (count, model.dtype, model.device), lambda: mtp_private.load(model))
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{named}: its multi-token-prediction layers can't be loaded from its checkpoint "
            f"{model.config.name_or_path!r}: choose another drafter, or a checkpoint with such layers. ({error})"
        ) from error
    check_attention(layers.config, named, otherwise=", or another drafter")
    return layers


class MtpRunner(StatesRunner):
    """Runs the layers; the methods are those of `DynamicRunner` that a drafter calls.

    Args:
        layers: see `mtp_layers`.
        states, model_kwargs, input_ids, capacity: see `StatesRunner`; the states are those of the last layer.
        kernels: what passes run in.
    """

    def __init__(
        self,
        layers: Any,
        states: HiddenStates,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
        capacity: int,
        kernels: Kernels = onednn_linears,
    ) -> None:
        self.layers, self.depth = layers, len(layers.layers)
        self._windows = attention_windows(layers.config)
        super().__init__(layers.config, states, model_kwargs, input_ids, capacity, behind=self.depth, ahead=self.depth)
        self._kernels = kernels(layers)
        self._step = self._span = 0
        self._ids = self._slots = self._last = input_ids.new_zeros(len(input_ids), 1)

    def _make_tables(self, total: int) -> None:
        super()._make_tables(total)
        self._masks = {
            kind: SlotMasks(total, window, self.layers.dtype, self._device) for kind, window in self._windows.items()
        }

    def rewind(self, lengths: Sequence[int]) -> None:
        """As `StatesRunner.rewind`."""
        super().rewind(lengths)
        self._step = 0

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """As `StatesRunner.forward`; a pass of a layer."""
        self._append(tokens.to(self._device))
        return mtp_private.logits(self.layers, self._last_states())

    def complete(self) -> None:
        """Have all layers read what the first has read, after a draft with fewer tokens than there are layers."""
        while 0 < self._step < self.depth:
            self._append(self._ids[:, -1:])

    def _append(self, tokens: Tensor) -> None:
        if not self._step:
            self._start(tokens)
        elif self._step < self.depth:  # the same places, a token later
            self._ids = torch.cat([self._ids[:, 1:], tokens], dim=1).scatter(1, self._last, tokens)
        else:
            self._slots, self._hidden = self._slots.gather(1, self._last) + 1, self._last_states()
            self._ids, self._last = tokens, torch.zeros_like(self._last)
            self._span += 1
        self._pass(min(self._step, self.depth - 1))
        self._step += 1
        if self._step == self.depth:
            self._settle()

    def _start(self, tokens: Tensor) -> None:
        """Set out from the places that are not certain yet; rows with fewer of them read arbitrary ones behind."""
        width = tokens.shape[1]
        counts = self._go_on(width)
        places = max([1, *counts])
        self._last = on_device([max(count - 1, 0) for count in counts], self._device).unsqueeze(1)
        first = on_device([width - count for count in counts], self._device).unsqueeze(1)
        lanes = first + torch.arange(places, device=self._device)
        self._ids = tokens.gather(1, lanes.clamp(max=width - 1))
        self._slots, self._hidden = self._given(places)
        self._span = max(self._certain) + places

    def _pass(self, layer: int) -> None:
        visible = self._reserve(self._slots, self._span)
        kinds = getattr(self.layers.config, "layer_types", None)
        masks = self._masks[kinds[layer] if kinds is not None else "full_attention"]
        with self._kernels():
            self._hidden = mtp_private.layer_states(
                self.layers,
                layer,
                self.layers.embed_tokens(self._ids),
                self._hidden,
                self._table.gather(1, self._slots + layer + 1),
                masks.of(self._slots, self._span, visible),
                self.cache,
            )
        self.passes += 1

    def _last_states(self) -> Tensor:
        """`[B, 1, H]`: the states of each row's last token."""
        return self._hidden.gather(1, self._last.unsqueeze(2).expand(-1, -1, self._hidden.shape[2]))
