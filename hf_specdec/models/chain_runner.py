"""Passes of what drafts in a chain, each pass from the hidden state that the one before made, over uneven rows.

Layer k reads, for each place s of the text, the hidden state before it (the target's at s, or what layer k - 1 made of
that) and the token at s + k + 1, and its last state gives the token at s + k + 2. The last layer goes on by itself:
it reads its own last state and the token that came of it. Every layer keeps the keys and values of place s in slot s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.masks import SlotMasks, attention_windows
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.states_runner import StatesRunner
from hf_specdec.models.traits import on_device


class ChainRunner(StatesRunner):
    """Runs the layers of a chain; the methods are those of `DynamicRunner` that a drafter calls.

    Args:
        part: the module that the layers are in.
        config: of the layers.
        depth: how many layers there are. Of several that always run one after another, the chain sees one.
        states, model_kwargs, input_ids, capacity: see `StatesRunner`.
        kernels: what passes run in.
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
        """What a layer makes of tokens `[B, k]` and the hidden states before them; subclasses define it.

        Returns:
            Hidden states `[B, k, H]`.
        """
        raise NotImplementedError

    def _logits(self, hidden: Tensor) -> Tensor:
        """`[B, 1, V]` of hidden states `[B, 1, H]`; subclasses define it."""
        raise NotImplementedError

    def _make_tables(self, total: int) -> None:
        super()._make_tables(total)
        self._masks = {
            kind: SlotMasks(total, window, self._dtype, self._device) for kind, window in self._windows.items()
        }

    def rewind(self, lengths: Sequence[int]) -> None:
        """As `StatesRunner.rewind`."""
        super().rewind(lengths)
        self._step = 0

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """As `StatesRunner.forward`; a pass of a layer."""
        with self._kernels():
            self._append(tokens.to(self._device))
            return self._logits(self._last_states())

    def complete(self) -> None:
        """Have all layers read what the first has read, after a draft with fewer tokens than there are layers."""
        with self._kernels():
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
        self._shown = self._reserve(self._slots, self._span)
        positions = self._table.gather(1, self._slots + layer + 1)
        self._hidden = self._made(layer, self._ids, self._hidden, positions)
        self.passes += 1

    def _mask_of(self, kind: str) -> Tensor:
        """The additive mask `[B, 1, k, span]` of the pass that is made, for a kind of layer."""
        return self._masks[kind].of(self._slots, self._span, self._shown)

    def _last_states(self) -> Tensor:
        """`[B, 1, H]`: the states of each row's last token."""
        return self._hidden.gather(1, self._last.unsqueeze(2).expand(-1, -1, self._hidden.shape[2]))
