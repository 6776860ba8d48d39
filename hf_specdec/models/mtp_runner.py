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
from hf_specdec.compat.transformers_private import attention_name
from hf_specdec.config import FORESEEN_TOKENS
from hf_specdec.models.dynamic_runner import extend_count, extend_mask, prompt_positions
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.masks import ATTENTION, LAYER_TYPES, SlotMasks, attention_windows
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.per_target import PerTarget
from hf_specdec.models.static_cache import RowsCache
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
    kinds = set(attention_windows(layers.config))
    if mtp_private.keeps_other_states(layers) or not kinds <= LAYER_TYPES:
        raise ValueError(
            f"{named}: its multi-token-prediction layers keep more than keys and values of their tokens "
            f"({', '.join(sorted(kinds))}), which can't be rolled back here: choose another drafter."
        )
    if (attention := attention_name(layers.config)) not in ATTENTION:
        raise ValueError(
            f"{named}: attn_implementation={attention!r} takes no masks of rows with different lengths: choose one of "
            f"{', '.join(map(repr, ATTENTION))}, or another drafter."
        )
    return layers


class MtpRunner:
    """Runs the layers; the methods are those of `DynamicRunner` that a drafter calls.

    The first pass after `rewind` reads texts: it has the target's hidden states. Those that follow read drafts.

    Args:
        layers: see `mtp_layers`.
        states: the target's hidden states, of its last layer.
        model_kwargs: what `generate` prepared for the target: masks and positions.
        input_ids: `[B, P]`, the prompts.
        capacity: the most tokens of a row, drafts included.
        kernels: what passes run in.
    """

    rewinds_far = True

    def __init__(
        self,
        layers: Any,
        states: HiddenStates,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
        capacity: int,
        kernels: Kernels = onednn_linears,
    ) -> None:
        self.layers, self.states, self.passes = layers, states, 0
        self.depth = len(layers.layers)
        # A row that lacks few tokens still runs as many places as the row that lacks most.
        self.cache = RowsCache(layers.config, 2 * capacity + self.depth, grows=True)
        batch_size, prompt_length = input_ids.shape
        self._certain = [0] * batch_size  # slots of each row that come of the text alone, in all layers
        self._texts = [0] * batch_size
        self._bounds = [capacity] * batch_size
        self._first: list[int] = []
        mask, positions = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
        self._mask = None if mask is None else extend_mask(mask[:, -prompt_length:], prompt_length)
        self._device = input_ids.device
        self._windows = attention_windows(layers.config)
        if positions is None or positions.dim() != 2:
            positions = prompt_positions(mask, prompt_length if mask is None else mask.shape[1], self._device)
        self._positions = positions[:, -prompt_length:]
        self._make_tables(min(capacity, prompt_length + FORESEEN_TOKENS) + self.depth)
        self._kernels = kernels(layers)
        self._step = 0
        self._ids = self._slots = self._last = input_ids.new_zeros(batch_size, 1)
        self._span = 0

    def _make_tables(self, total: int) -> None:
        """Masks and positions of `total` slots."""
        positions = extend_count(self._positions, total + self.depth + 1)
        assert positions is not None
        self._total, self._table = total, positions.expand(len(self._certain), -1)
        self._visible = None
        if self._mask is not None or any(self._first):
            shown = torch.ones(len(self._certain), total, dtype=torch.bool, device=self._device)
            if self._mask is not None:
                shown[:, : self._mask.shape[1]] = self._mask.bool()
            for row, first in enumerate(self._first):
                shown[row, :first] = False
            self._visible = shown
        self._masks = {
            kind: SlotMasks(total, window, self.layers.dtype, self._device) for kind, window in self._windows.items()
        }

    @property
    def read(self) -> list[int]:
        """Tokens that each row has read for good: others are read again, by all layers."""
        return [certain + 1 for certain in self._certain]

    def retain(self, rows: Sequence[int]) -> Sequence[int]:
        """As `DynamicRunner.retain`: passes run all rows."""
        return range(len(self._certain))

    def begin(self, lengths: Sequence[int]) -> None:
        """Called before a round: the texts' lengths, which bound what is read for good."""
        self._bounds = [length - self.depth for length in lengths]
        if not self._first and self.states.first is not None:  # those before are in the caller's cache
            self._first, self._certain = list(self.states.first), list(self.states.first)
            self._make_tables(self._total)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Go on after the first `lengths` tokens of each row."""
        self._texts, self._step = list(lengths), 0

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """Append `tokens` `[B, k]` to the rows.

        Returns:
            Logits `[B, 1, V]` of the token after them.
        """
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
            self._certain = [
                max(old, min(length - self.depth, bound))
                for old, length, bound in zip(self._certain, self._texts, self._bounds, strict=True)
            ]
            self.states.drop(self._certain)

    def _start(self, tokens: Tensor) -> None:
        """Set out from the places that are not certain yet; rows with fewer of them read arbitrary ones behind."""
        width = tokens.shape[1]
        self._texts = [read + width for read in self._texts]
        rows = zip(self._texts, self._certain, strict=True)
        counts = [min(max(length - 1 - certain, 0), width) for length, certain in rows]
        places = max([1, *counts])
        lanes = torch.arange(places, device=self._device)
        self._last = on_device([max(count - 1, 0) for count in counts], self._device).unsqueeze(1)
        first = on_device([width - count for count in counts], self._device).unsqueeze(1)
        self._ids = tokens.gather(1, (first + lanes).clamp(max=width - 1))
        self._hidden = self.states.of(self._certain, places).to(self._device)
        self._slots = on_device(self._certain, self._device).unsqueeze(1) + lanes
        self._span = max(self._certain) + places

    def _pass(self, layer: int) -> None:
        if self._span > self._total:
            self._make_tables(2 * self._span)
        kinds = getattr(self.layers.config, "layer_types", None)
        masks = self._masks[kinds[layer] if kinds is not None else "full_attention"]
        visible = None if self._visible is None else self._visible[:, : self._span]
        self.cache.reserve(self._span)
        self.cache.slots.next_pass(self._slots, self._span)
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
