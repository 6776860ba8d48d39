"""Passes of chained layers, each of which reads the hidden states of the one before, over rows of different lengths.

For each place s of the text, layer k reads a hidden state (the target's at s, or the output of layer k - 1 for it) and
the token at s + k + 1; its output predicts the token at s + k + 2. The last layer continues alone: it reads its own
last output and the token predicted from it. Every layer keeps the keys and values of place s in slot s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.masks import attention_mask, attention_windows
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.states_runner import StatesRunner
from hf_specdec.models.traits import on_device


class ChainRunner(StatesRunner):
    """Runs the layers of a chain, with the methods of `DynamicRunner` that drafters call.

    Args:
        part: the module that holds the layers.
        config: the configuration of the layers.
        depth: the number of layers. Layers that always run one after another count as one.
        states, model_kwargs, input_ids, capacity: see `StatesRunner`.
        kernels: makes the context that passes run in.
    """

    def __init__(
        self,
        part: Any,
        config: Any,
        depth: int,
        states: HiddenStates,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
        capacity: int,
        kernels: Kernels = onednn_linears,
    ) -> None:
        self.depth = depth
        self._windows, self._dtype = attention_windows(config), part.dtype
        super().__init__(config, states, model_kwargs, input_ids, capacity, behind=depth, ahead=depth)
        self._kernels = kernels(part)
        self._step = self._span = 0
        self._ids = self._slots = self._last = input_ids.new_zeros(len(input_ids), 1)

    def _made(self, layer: int, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Run a layer on tokens `[B, k]` and the hidden states before them; defined by subclasses.

        Returns:
            Hidden states `[B, k, H]`.
        """
        raise NotImplementedError

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits `[B, 1, V]` of hidden states `[B, 1, H]`; defined by subclasses."""
        raise NotImplementedError

    def rewind(self, lengths: Sequence[int]) -> None:
        """As `StatesRunner.rewind`."""
        super().rewind(lengths)
        self._step = 0

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """As `StatesRunner.forward`, by a pass of one layer."""
        with self._kernels():
            self._append(tokens.to(self._device))
            return self._logits(self._last_states())

    def complete(self) -> None:
        """Run the remaining layers on what the first has read, after a draft with fewer tokens than layers."""
        with self._kernels():
            while 0 < self._step < self.depth:
                self._append(self._ids[:, -1:])

    def _append(self, tokens: Tensor) -> None:
        if not self._step:
            self._start(tokens)
        elif self._step < self.depth:  # the same places, one token later
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
        """Start with the places that are not read for good; rows with fewer of them also read arbitrary later ones."""
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
        self._shown = self._reserve(self._slots, self._span)
        positions = self._table.gather(1, self._slots + layer + 1)
        self._hidden = self._made(layer, self._ids, self._hidden, positions)
        self.passes += 1

    def _mask_of(self, kind: str) -> Tensor:
        """The additive mask `[B, 1, k, span]` of the current pass, for a kind of layer."""
        return attention_mask(self._slots, self._span, self._windows[kind], self._dtype, self._shown)

    def _last_states(self) -> Tensor:
        """`[B, 1, H]`: the hidden states of each row's last token."""
        return self._hidden.gather(1, self._last.unsqueeze(2).expand(-1, -1, self._hidden.shape[2]))
