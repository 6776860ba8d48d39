"""Passes of one model over rows of different lengths, in a static cache that rolls back without moving data.

The interface is that of `dynamic_runner.DynamicRunner`. Masks are built from slots, padding and windows, and positions
are looked up by slot, so a ragged batch costs no more than an even one. Finished rows are left out of passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_specdec.config import FORESEEN_TOKENS
from hf_specdec.models.cache_choice import encoding_of
from hf_specdec.models.cache_names import CACHE_NAME
from hf_specdec.models.dynamic_runner import extend_count, extend_mask, in_chunks, prompt_positions
from hf_specdec.models.hidden_states import HiddenStates, states_of
from hf_specdec.models.masks import Masks, attention_windows, by_kind, slot_masks
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.recorded_passes import RecordedPasses, recorded_passes
from hf_specdec.models.rope_stages import stages_of
from hf_specdec.models.static_cache import RowsCache
from hf_specdec.models.stored_tensors import tensors_of
from hf_specdec.models.traits import Outputs, on_device, pass_mode, text_prefix


class Passes(Protocol):
    """Another way to run passes over few tokens, with the same results."""

    def run(self, tokens: Tensor, slots: Tensor, span: int) -> tuple[Tensor, Tensor | None] | None:
        """Read `tokens` into `slots`, `[B, k]` and below `span`.

        Returns:
            Logits `[B, k, V]` and hidden states, which stay as they are; None if unable to.
        """


WIDEST_RECORDED = 32  # tokens of a pass; only prompts and drafts that catch up are wider


class StaticRunner:
    """Runs one model's decoder with a `RowsCache`; the methods are those of `DynamicRunner`.

    Args:
        model: one for which `supports_rows_cache` holds.
        model_kwargs: what `generate` prepared for the model, with an unused `RowsCache` as its cache.
        shape: B and P, of the prompts `[B, P]`.
        kernels, chunk: as in `DynamicRunner`.
        prompt_alone: as in `DynamicRunner`; only read by the loop, which then makes no drafts in its first round.

    The rows in use occupy the first places of the cache, so a pass reads them without copying. A row that is left out
    swaps places with a later one and keeps its content, since the cache may be returned. Rows of an encoder-decoder are
    not left out, since their encodings would have to move, too.

    Attributes:
        visible: `[m, capacity]` bool, the slots without padding of the m rows in use, by place.
        positions: `[m, capacity]`, the position of each slot's token, by place.
        windows: see `attention_windows`.
        outputs: which outputs passes return.
        prepared: runs passes over few tokens if possible; ended rows are then not left out.
        settled: as in `DynamicRunner`; False while recordings of this shape are made or verified.
    """

    rewinds_far = True
    settled = True

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        shape: tuple[int, int],
        kernels: Kernels = onednn_linears,
        chunk: int | None = None,
        prompt_alone: bool = False,
    ) -> None:
        self.model = model
        self._chunk, self.prompt_alone = chunk, prompt_alone
        self.passes = 0
        self.cache: RowsCache = model_kwargs[CACHE_NAME]
        (batch_size, prompt_length), device = shape, model.device
        self.read = [0] * batch_size
        self._fed, self._left_out = list(range(batch_size)), list[int]()  # rows by their places in the cache
        self._encoding = encoding_of(model_kwargs)
        capacity, prefix = self.cache.capacity, text_prefix(model)
        if self.cache.grows:
            capacity = min(capacity, prompt_length + FORESEEN_TOKENS)
        mask = extend_mask(model_kwargs.get(f"{prefix}attention_mask"), capacity)
        self._padded = mask is not None
        positions = model_kwargs.get(f"{prefix}position_ids")
        if positions is None:
            positions = prompt_positions(mask, prompt_length, device)
        positions = extend_count(positions, capacity)
        assert positions is not None
        self.positions = positions.expand(batch_size, -1)
        self.stages = stages_of(model, self.positions, prompt_length, 0, self.cache.capacity)
        self._aside: Sequence[int] = ()
        everything = torch.ones(batch_size, capacity, dtype=torch.bool, device=device)
        self.visible = everything if mask is None else mask.bool()
        self.windows = attention_windows(model.config)
        self._all_slots = torch.arange(capacity, device=device).unsqueeze(0)
        self._mode, self._kernels = pass_mode(model), kernels(model)
        self._recorded, self._made_for = recorded_passes(model, kernels), kernels
        self._weights = [] if self._recorded is None else tensors_of(model)
        self.outputs = Outputs.of(model)
        self.states: HiddenStates | None = None
        self.prepared: Passes | None = None

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """As `DynamicRunner.forward`."""
        *pieces, last = in_chunks(tokens.to(self.positions.device), count, self._chunk)
        for piece in pieces:
            self._pass(piece, 1)
        return self._pass(last, count)

    def _pass(self, tokens: Tensor, count: int) -> Tensor:
        if self._left_out:
            tokens = tokens.index_select(0, self._fed_rows)
        width, read = tokens.shape[1], [self.read[row] for row in self._fed]
        span = max(read) + width
        if span > self._all_slots.shape[1]:
            self._lengthen(span)
        slots = self._slots(read, width)
        self.settled = True
        done = self.prepared.run(tokens, slots, span) if self.prepared is not None and any(read) else None
        logits, states = self._unprepared(tokens, slots, span, count) if done is None else done
        if self.states is not None and states is not None:
            self.states.add([n + width for n in self.read], self._by_row(states))
        self.passes += 1
        for row in self._fed:
            self.read[row] += width
        return self._by_row(logits if logits.shape[1] == count else logits[:, -count:])

    def _unprepared(self, tokens: Tensor, slots: Tensor, span: int, count: int) -> tuple[Tensor, Tensor | None]:
        """The pass's logits, and the hidden states `[m, k, H]` if requested."""
        with self._mode(), self._kernels():
            self.cache.reserve(span)
            if self._recorded is not None and self.passes and any(self.read) and tokens.shape[1] <= WIDEST_RECORDED:
                return self._recorded_pass(self._recorded, tokens, slots, span)
            masks, positions = self._masks_of(slots, span), self._positions_of_pass()
            asked = self.outputs.last(count)
            outputs = masked_pass(
                self.model, self.cache, tokens, slots, positions, masks, span=span, asked=asked, encoding=self._encoding
            )
            self._encoding = None
        if self.states is None:
            return outputs.logits, None
        states = states_of(outputs, self.states.layers, tokens.shape[1])
        self._states_width = states.shape[2]
        return outputs.logits, states

    @property
    def lacks_encoding(self) -> bool:
        """Whether the cache still lacks the encoder's output, which only unprepared passes read."""
        return self._encoding is not None

    def _lengthen(self, slots: int) -> None:
        """Extend the tables of slots and positions to twice the needed slots."""
        positions = extend_count(self.positions, 2 * slots)
        assert positions is not None
        more = 2 * slots - self.visible.shape[1]
        self.positions, self.visible = positions, torch.nn.functional.pad(self.visible, (0, more), value=True)
        self._all_slots = torch.arange(2 * slots, device=self._all_slots.device).unsqueeze(0)

    def _positions_of_pass(self) -> Tensor:
        """`positions`, adjusted for rows that are set aside."""
        if not self._aside:
            return self.positions
        positions = self.positions.clone()
        positions[[place for place, row in enumerate(self._fed) if row in self._aside]] = self._aside_position
        return positions

    def _slots(self, read: Sequence[int], width: int) -> Tensor:
        """`[m, width]`: the next slots of each row."""
        if len(read) == 1:
            return self._all_slots[:, read[0] : read[0] + width]
        return self._all_slots[:, :width] + on_device(read, self._all_slots.device).unsqueeze(1)

    def _recorded_pass(
        self, recorded: RecordedPasses, tokens: Tensor, slots: Tensor, span: int
    ) -> tuple[Tensor, Tensor | None]:
        """A pass over few tokens, recorded after a while; it returns all logits, so one recording serves all counts.

        A recording returns one tensor: the hidden states if requested, then the logits.
        """
        masks, asked, handed = self._slot_masks(slots, span), self.outputs.last(None), self.states

        def step(tokens: Tensor, slots: Tensor, positions: Tensor, *rest: Tensor, model: Any = self.model) -> Tensor:
            given, looked_at = by_kind(dict(zip(masks, rest, strict=False))), rest[0].shape[-1]
            outputs = masked_pass(model, self.cache, tokens, slots, positions, given, span=looked_at, asked=asked)
            if handed is None:
                logits: Tensor = outputs.logits
                return logits
            return torch.cat([states_of(outputs, handed.layers, tokens.shape[1]), outputs.logits], dim=-1)

        inputs = [tokens, slots, self.positions, *masks.values(), *self.cache.tensors(), *self._weights]
        passes = recorded.of(len(self._fed))
        self.settled = passes.is_settled(inputs, span)
        returned = passes.run(step, inputs, span, self.model)
        if handed is None:
            return returned, None
        width = self._states_width
        return returned[..., width:], returned[..., :width].to(self.model.dtype)

    def _by_row(self, logits: Tensor) -> Tensor:
        """`[B, count, V]` from the logits `[m, count, V]` of the rows in use; zeros for the others."""
        if not self._left_out:
            return logits
        return logits.new_zeros(len(self.read), *logits.shape[1:]).index_copy_(0, self._fed_rows, logits)

    def _masks_of(self, slots: Tensor, span: int) -> Masks:
        """The masks of a pass; for a prompt the model makes its own from the padding, without a table of all pairs."""
        if not any(self.read):
            return self.visible[:, :span].long() if self._padded else None
        return by_kind(self._slot_masks(slots, span))

    def _slot_masks(self, slots: Tensor, span: int) -> dict[str, Tensor]:
        visible = self.visible[:, :span] if self._padded else None
        return slot_masks(slots, span, self.windows, self.model.dtype, visible)

    def rewind(self, lengths: Sequence[int]) -> None:
        """As `DynamicRunner.rewind`; only lengths change."""
        self.read = [min(n, length) for n, length in zip(self.read, lengths, strict=True)]

    @property
    def layers_read(self) -> tuple[int, ...]:
        """The layers whose hidden states passes hand out."""
        return () if self.states is None else tuple(self.states.layers)

    def hand_out(self, states: HiddenStates) -> None:
        """As `DynamicRunner.hand_out`."""
        self.states, self.outputs = states, self.outputs.with_hidden_states(states.layers)
        self._recorded, states.runner = recorded_passes(self.model, self._made_for, states.layers), self

    def keys_of(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `DynamicRunner.keys_of`, but token i of a row is in slot i, and slots after the text may follow."""
        stored, span = self.cache.layers[layer], max(self.read)
        keys, values = stored.keys[:, :, :span], stored.values[:, :, :span]
        if self._left_out:
            places = self._places()
            keys, values = keys[places], values[places]
        read = on_device(self.read, self.positions.device).unsqueeze(1)
        return keys, values, self._by_row(self.visible[:, :span]) & (self._all_slots[:, :span] < read)

    def set_aside(self, rows: Sequence[int], position: int) -> None:
        """As `DynamicRunner.set_aside`."""
        self._aside, self._aside_position = rows, position

    def retain(self, rows: Sequence[int]) -> Sequence[int]:
        """As `DynamicRunner.retain`; the other rows are left out of passes."""
        count = len(rows)
        if self.prepared is not None or self.cache.encoded is not None:
            return range(len(self.read))
        if count == len(self._fed):
            return rows
        places = list(range(len(self._fed)))
        freed = [place for place in places[:count] if self._fed[place] not in rows]
        ended = [place for place in places[count:] if self._fed[place] in rows]
        with self._mode():
            self.cache.swap(freed, ended, max(self.read))
        for place, other in zip(freed, ended, strict=True):
            places[place], places[other] = other, place
        moved = [self._fed[place] for place in places]
        self._fed, self._left_out = moved[:count], moved[count:] + self._left_out
        self._fed_rows = torch.tensor(
            self._fed, device=self.positions.device
        )  # copied now, since a copy to the device would wait for a pass
        kept = places[:count]
        self.positions, self.visible = self.positions[kept], self.visible[kept]
        return rows

    def take(self, cache: DynamicCache, most: int) -> None:
        """Take over the tokens of another cache, at most `most` per row. Called before the first pass."""
        known = min(cache.get_seq_length(), most)
        for layer, given in zip(self.cache.layers, cache.layers, strict=False):
            if known and given.is_initialized:
                if not layer.is_initialized:
                    layer.lazy_initialization(given.keys, given.values)
                layer.keys[:, :, :known] = given.keys[:, :, :known]
                layer.values[:, :, :known] = given.values[:, :, :known]
        self.read = [known] * len(self.read)

    def give(self, cache: DynamicCache, length: int) -> None:
        """Return the first `length` tokens of every row, as far as they were read, to a cache of transformers."""
        made = self.as_dynamic(min(length, *self.read))
        cache.layers = made.layers

    def end(self, length: int) -> None:
        """As `DynamicRunner.end`."""
        self.rewind([length] * len(self.read))

    def as_dynamic(self, length: int) -> Cache:
        """The cache as plain `generate` would leave it after `length` tokens of every row."""
        return self.cache.as_dynamic(self.model.config, length, self._places())

    def _places(self) -> list[int]:
        """Each row's place in the cache."""
        rows = self._fed + self._left_out
        return sorted(range(len(rows)), key=rows.__getitem__)


def static_pass(
    model: PreTrainedModel,
    cache: RowsCache,
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    visible: Tensor,
    windows: dict[str, int | None],
    *,
    span: int,
    asked: dict[str, Any],
) -> Any:
    """A forward pass that writes to given slots: a function of tensors that can be captured or compiled.

    Args:
        tokens, slots: `[B, k]`.
        positions, visible: `[B, capacity]`, by slot.
        windows: see `attention_windows`.
        span: slots that attention reads.
        asked: which outputs to return, see `Outputs.last`.

    Returns:
        The model's outputs, of which the logits are `[B, count, V]`, or of all tokens `[B, k, V]`.
    """
    masks = by_kind(slot_masks(slots, span, windows, model.dtype, visible[:, :span]))
    return masked_pass(model, cache, tokens, slots, positions, masks, span=span, asked=asked)


def masked_pass(
    model: PreTrainedModel,
    cache: RowsCache,
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    masks: Masks,
    *,
    span: int,
    asked: dict[str, Any],
    encoding: Tensor | None = None,
) -> Any:
    """`static_pass` with given masks: 4-D ones, or for a prompt the 2-D one of `generate`.

    Args:
        encoding: `[B, S, H]`, the encoder's output, in the first pass of a call.
    """
    cache.slots.next_pass(slots, span)
    text = {"input_ids": tokens, "attention_mask": masks, "position_ids": positions.gather(1, slots)}
    given: dict[str, Any] = {f"{text_prefix(model)}{name}": value for name, value in text.items()}
    if cache.encoded is not None:
        unread = torch.zeros(1, 1, 1, dtype=model.dtype, device=tokens.device).expand(cache.encoded)
        given["encoder_outputs"] = BaseModelOutput(last_hidden_state=unread if encoding is None else encoding)
    cached = cache.for_pass(encodes=encoding is not None)
    return model(**given, use_cache=True, return_dict=True, **{CACHE_NAME: cached}, **asked)
