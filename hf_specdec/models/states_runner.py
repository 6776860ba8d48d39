"""The base of runners that read the target's hidden states: rows, places, masks and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_specdec.config import FORESEEN_TOKENS
from hf_specdec.models.dynamic_runner import extend_count, extend_mask, prompt_positions
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.static_cache import RowsCache
from hf_specdec.models.traits import on_device


class StatesRunner:
    """Base class of runners that read texts with the target's hidden states, with the methods that drafters call.

    The first pass after `rewind` reads text and the target's hidden states; later passes only draft.

    Args:
        config: the configuration of the layers.
        states: the target's hidden states.
        model_kwargs: what `generate` prepared for the target: masks and positions.
        input_ids: `[B, P]`, the prompts.
        capacity: the most tokens of a row, drafts included.
        behind: how many tokens of the text must follow a place before it is read for good.
        ahead: how many places a pass may write after the text.

    Attributes:
        passes: the number of passes so far.
    """

    rewinds_far = True

    def __init__(
        self,
        config: PreTrainedConfig,
        states: HiddenStates,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
        capacity: int,
        *,
        behind: int = 1,
        ahead: int = 1,
    ) -> None:
        self.states, self.passes = states, 0
        self._behind, self._ahead = behind, ahead
        # All rows run as many places as the row with the most unread tokens.
        self.cache = RowsCache(config, 2 * capacity + ahead, grows=True)
        batch_size, prompt_length = input_ids.shape
        self._certain = [0] * batch_size  # places of each row that are read for good
        self._texts = [0] * batch_size
        self._bounds = [capacity] * batch_size
        self._first: list[int] = []
        mask, positions = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
        self._mask = None if mask is None else extend_mask(mask[:, -prompt_length:], prompt_length)
        self._device = input_ids.device
        if positions is None or positions.dim() != 2:
            positions = prompt_positions(mask, prompt_length if mask is None else mask.shape[1], self._device)
        self._positions = positions[:, -prompt_length:]
        self._make_tables(min(capacity, prompt_length + FORESEEN_TOKENS) + ahead)

    def _make_tables(self, total: int) -> None:
        """Make the tables of visibility and positions for `total` slots."""
        positions = extend_count(self._positions, total + self._ahead + 1)
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

    @property
    def read(self) -> list[int]:
        """The number of tokens that each row has read for good; later ones are read again."""
        return [certain + 1 for certain in self._certain]

    def retain(self, rows: Sequence[int]) -> Sequence[int]:
        """As `DynamicRunner.retain`; passes always run all rows."""
        return range(len(self._certain))

    def begin(self, lengths: Sequence[int]) -> None:
        """Called before a round with the lengths of the texts, which limit what is read for good."""
        self._bounds = [length - self._behind for length in lengths]
        if not self._first and self.states.first is not None:  # earlier places are in the caller's cache
            self._first, self._certain = list(self.states.first), list(self.states.first)
            self._make_tables(self._total)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Continue after the first `lengths` tokens of each row."""
        self._texts = list(lengths)

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """Append `tokens` `[B, k]` to the rows; defined by subclasses.

        Returns:
            Logits `[B, 1, V]` of the token after them.
        """
        raise NotImplementedError

    def complete(self) -> None:
        """Called after a round's draft."""

    def _go_on(self, width: int) -> list[int]:
        """Lengthen the texts by `width` tokens; returns the number of places to read in each row."""
        self._texts = [read + width for read in self._texts]
        rows = zip(self._texts, self._certain, strict=True)
        return [min(max(length - 1 - certain, 0), width) for length, certain in rows]

    def _given(self, places: int) -> tuple[Tensor, Tensor]:
        """The slots `[B, places]` from each row's first unread one on, and the target's states there `[B, places, H]`.

        Rows with fewer unread places get arbitrary states after these.
        """
        lanes = torch.arange(places, device=self._device)
        slots = on_device(self._certain, self._device).unsqueeze(1) + lanes
        return slots, self.states.of(self._certain, places).to(self._device)

    def _reserve(self, slots: Tensor, span: int) -> Tensor | None:
        """Have the next pass write to `slots`, all below `span`; returns the visible slots, None for all."""
        if span > self._total:
            self._make_tables(2 * span)
        self.cache.reserve(span)
        self.cache.slots.next_pass(slots, span)
        return None if self._visible is None else self._visible[:, :span]

    def _settle(self) -> None:
        """Update which places are read for good, and drop the target's states of these."""
        rows = zip(self._certain, self._texts, self._bounds, strict=True)
        self._certain = [max(old, min(length - self._behind, bound)) for old, length, bound in rows]
        self.states.drop(self._certain)
