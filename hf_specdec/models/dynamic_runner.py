"""Passes of one model over a batch whose rows have read different numbers of tokens.

A runner appends tokens, returns logits and rewinds. It hides masks, positions and caches from the loop and the
drafters, which only deal with rows and counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import FORESEEN_TOKENS
from hf_specdec.models import cache_rollback
from hf_specdec.models.cache_names import cache_argument, takes_cache
from hf_specdec.models.hidden_states import HiddenStates, states_of
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.recurrent_states import recurrent_layers
from hf_specdec.models.rope_stages import stages_of
from hf_specdec.models.traits import (
    Outputs,
    embedded,
    has_default_inputs,
    on_device,
    padding_without_position,
    pass_mode,
    text_prefix,
)

# Arguments that later passes of a text model may need besides masks, positions and tokens.
LASTING_KWARGS = frozenset({"use_cache", "encoder_outputs", "attention_mask"})
PER_TOKEN_KWARGS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class DynamicRunner:
    """Runs one model over all rows at once, with a cache of transformers or without one.

    Rows are right-aligned: each row's last token is in the last slot. The first `lag` slots of a row that has read
    `lag` tokens fewer than the longest are masked.

    Args:
        model: any decoder-only or encoder-decoder model of transformers.
        model_kwargs: what `generate` prepared for the model: masks, positions, encoder outputs, cache.
        input_ids: `[B, P]`, the prompts.
        capacity: the most tokens of a row, including drafts.
        hidden: tokens in a given cache that precede `input_ids`.
        kernels: makes the context manager for passes.
        chunk: the most tokens of the prompt per pass, see `in_chunks`; None for no limit.
        prompt_alone: read the prompt in a separate pass, even if the first call appends more.
    """

    rewinds_far = True  # to any length, not only to those since the last rewind
    settled = True  # whether the latest pass took as long as later ones of its shape

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
        capacity: int,
        hidden: int = 0,
        kernels: Kernels = onednn_linears,
        chunk: int | None = None,
        prompt_alone: bool = False,
    ) -> None:
        self.model = model
        self.passes = 0
        self.prompt_alone = prompt_alone
        self.kwargs = dict(model_kwargs)
        parameters = inspect.signature(model.forward).parameters
        self._cache_key = cache_argument(model)
        self.cache = self.kwargs.pop(self._cache_key, None)
        # `generate` makes a cache for every model, and a signature may hide whether the model uses it.
        self._names_cache = self._cache_key in parameters
        if not takes_cache(model):
            self.cache = None
        self.kwargs.pop("logits_to_keep", None)
        self.hidden = hidden
        batch_size, prompt_length = input_ids.shape
        read = 0
        if self.cache is not None:
            self._recording = cache_rollback.start_recording(self.cache)
            cached = cache_rollback.cached_length(self.cache, self._cache_key)
            read = max(min(cached - hidden, prompt_length - 1), 0)
        self.read = [read] * batch_size
        self._apart: frozenset[int] = frozenset()  # layers of the cache that don't grow with the text
        self._pictures = 0  # slots of the cache before the text that hold pictures
        self._prompt_length = prompt_length
        self._chunk = None if embedded(self.kwargs) or self.cache is None else chunk
        self._width = read + hidden
        self._device = input_ids.device
        self._outputs = Outputs.of(model)
        self._mode, self._kernels = pass_mode(model), kernels(model)
        self._padding = padding_without_position(model)
        self._make_tables(input_ids, parameters, min(capacity, prompt_length + FORESEEN_TOKENS) + hidden)
        self._own_inputs = not has_default_inputs(model)
        self._prepared = (
            not self._own_inputs and LASTING_KWARGS.issuperset(self.kwargs) and input_ids.device == model.device
        )
        self.stages = stages_of(model, self._positions, prompt_length, hidden, capacity)
        self._aside: Sequence[int] = ()
        self.states: HiddenStates | None = None
        needs_text = self.cache is None or self._own_inputs or not self._names_cache
        self._text = input_ids[:, :read] if needs_text else None

    def _make_tables(self, input_ids: Tensor, parameters: Mapping[str, Any], total: int) -> None:
        """Make the masks, positions and token types of `total` slots that the model accepts."""
        prefix = text_prefix(self.model)
        self._mask_key, self._position_key = f"{prefix}attention_mask", f"{prefix}position_ids"
        self._ids_key = f"{prefix}input_ids"
        self._takes_mask = self._mask_key in parameters
        self._total = total
        self._mask = extend_mask(self.kwargs.pop(self._mask_key, None), total)
        needs_ones = self._mask is None and len(input_ids) > 1 and self._takes_mask
        self._ones = input_ids.new_ones(len(input_ids), total) if needs_ones else None
        positions = self.kwargs.pop(self._position_key, None)
        if positions is None and self._position_key in parameters:
            positions = prompt_positions(self._mask, self._prompt_length + self.hidden, input_ids.device)
        self._positions = extend_count(positions, total)
        self._per_token = {
            key: _extend_types(key, self.kwargs.pop(key), total)
            for key in PER_TOKEN_KWARGS
            if self.kwargs.get(key) is not None
        }

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """Append `tokens` `[B, k]` to the rows, in one pass or in chunks.

        Returns:
            Logits `[B, count, V]` of the last `count` appended positions, in the model's dtype.
        """
        tokens = tokens.to(self._device)
        unread = 0 if self.passes else self._prompt_length - self.read[0]  # of the prompt
        alone = unread if self.prompt_alone and unread < tokens.shape[1] else 0
        prompt, rest = tokens[:, :alone], tokens[:, alone:]
        *pieces, last = [*(in_chunks(prompt, 1, self._chunk) if alone else ()), *in_chunks(rest, count, self._chunk)]
        for piece in pieces:
            self._pass(piece, 1)
            self.rewind(self.read)  # sliding windows drop what has left them
        if self._padding is None:
            return self._pass(last, count)
        return self._split_pass(last, count, self._padding, max(unread - tokens.shape[1] + last.shape[1], 0))

    def _split_pass(self, tokens: Tensor, count: int, padding: int, prompt: int) -> Tensor:
        """Like `_pass`, split at padding after the first `prompt` tokens, for models that count tokens without it."""
        ends = (tokens[:, prompt:-1] == padding).any(dim=0).nonzero().flatten()
        logits, left = [], tokens.shape[1]
        for piece in tokens.tensor_split((ends + prompt + 1).cpu(), dim=1):
            left -= piece.shape[1]
            logits.append(self._pass(piece, min(max(count - left, 1), piece.shape[1])))
        return torch.cat(logits, dim=1)[:, -count:]

    def _pass(self, tokens: Tensor, count: int) -> Tensor:
        appended = tokens.shape[1]
        read = [n + appended for n in self.read]
        lags = [self._width - self.hidden - n for n in self.read]
        last_slot = self._width + appended
        if last_slot > self._total:
            self._lengthen(last_slot)
        text = tokens if self._text is None else torch.cat([self._text, tokens], dim=1)
        # A model that prepares its own inputs gets them whole, as from `generate`, and cuts them itself.
        first_slot = 0 if self.cache is None or self._own_inputs else self._width
        inputs = self._inputs(tokens, text, self._slot_kwargs(lags, first_slot, last_slot))
        inputs |= self._outputs.last(count)
        with self._mode(), self._kernels():
            outputs = self.model(**inputs, return_dict=True)
        if self.states is not None:
            self.states.add(read, states_of(outputs, self.states.layers, appended))
        if self._text is not None:
            self._text = text
        if not self.passes and not self._names_cache:
            self._leave_unused_cache()
        self.passes += 1
        self._width, self.read = last_slot, read
        # Layers whose lengths are equal by chance are distinguished in the second pass, before any draft is cut.
        if self._own_inputs and self.passes <= 2:
            self._note_pictures()
        logits: Tensor = outputs.logits
        return logits if logits.shape[1] == count else logits[:, -count:]

    def _lengthen(self, slots: int) -> None:
        """Extend the tables of masks, positions and token types to twice the slots that are needed."""
        total = self._total = 2 * slots
        self._mask, self._positions = extend_mask(self._mask, total), extend_count(self._positions, total)
        self._per_token = {key: _extend_types(key, types, total) for key, types in self._per_token.items()}
        if self._ones is not None:
            self._ones = self._ones.new_ones(self._ones.shape[0], total)

    def _leave_unused_cache(self) -> None:
        """After the first pass: continue without a cache that the model has left empty."""
        if self.cache is not None and not self.cache.get_seq_length():
            cache_rollback.stop_recording(self._recording)
            self.cache = None

    def _note_pictures(self) -> None:
        """After a pass: note where pictures are in the cache, in separate layers or slots."""
        if self.cache is None or recurrent_layers(self.cache):
            return
        self._apart = cache_rollback.layers_apart(self.cache)
        self._pictures = self.cache.get_seq_length() - self._width
        if self._pictures and len(self.read) > 1:
            raise ValueError(
                f"{self._cache_key}={type(self.cache).__name__} of {type(self.model).__name__} holds "
                f"{self._pictures} slots besides the text of {len(self.read)} rows: pass one row per call."
            )

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget what each row has read beyond its entry of `lengths`."""
        kept = [min(n, length) for n, length in zip(self.read, lengths, strict=True)]
        cuts = [n - k for n, k in zip(self.read, kept, strict=True)]
        self.read = kept
        if min(cuts) == max(cuts):
            self._forget_last(cuts[0])
            return
        new_width = max(kept) + self.hidden
        shifts = [new_width - (self._width - cut) for cut in cuts]
        if self._text is not None:
            self._text = cache_rollback.shift_rows(self._text, shifts, new_width - self.hidden)
        if self.cache is not None:
            cache_rollback.realign(self.cache, self._width, shifts, new_width, self._apart)
        self._width = new_width

    def hand_out(self, states: HiddenStates) -> None:
        """Hand out the hidden states of every token that passes read from now on."""
        self.states, self._outputs = states, self._outputs.with_hidden_states(states.layers)
        states.runner = self

    def keys_of(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The keys and values of a layer.

        Returns:
            Keys and values `[B, H, n, D]`, and which slots hold tokens `[B, n]`; the last slot holds each row's last
            token.
        """
        stored = cache_rollback.self_attention(self.cache).layers[layer]
        mask, lags = self._mask, [self._width - self.hidden - n for n in self.read]
        if mask is None:
            mask = torch.ones(len(lags), self._width, dtype=torch.long, device=self._device)
        shown = _rows_at(mask, lags, 0, self._width, before=0).bool()
        return stored.keys, stored.values, shown[:, -stored.keys.shape[2] :]

    def set_aside(self, rows: Sequence[int], position: int) -> None:
        """Run the new tokens of these rows, which are discarded, at one position until further notice.

        So they don't change the pass's highest position, which rotary frequencies may depend on.
        """
        self._aside, self._aside_position = rows, position

    def retain(self, rows: Sequence[int]) -> Sequence[int]:
        """Drop all other rows from now on; the logits of dropped rows are arbitrary.

        Returns:
            The rows that passes still run: all of them here, only `rows` in runners that can leave rows out.
        """
        return range(len(self.read))

    def end(self, length: int) -> None:
        """Leave the cache as plain `generate` would after `length` tokens, even after an exception.

        If a pass was interrupted or a sliding window has lost needed tokens, the cache is emptied instead: the next
        call then reads the whole text again, with the same result.
        """
        if self.cache is None:
            return
        slots = self._width + self._pictures
        cache_rollback.forget_broken_pass(self.cache, slots, self._apart)
        if cache_rollback.can_forget(self.cache, slots, max(max(self.read) - length, 0), self._apart):
            self.rewind([length] * len(self.read))
        else:
            cache_rollback.forget_all(self.cache)
        cache_rollback.stop_recording(self._recording)

    def _inputs(self, tokens: Tensor, text: Tensor, slot_kwargs: dict[str, Tensor]) -> dict[str, Any]:
        """The arguments of a pass over `tokens`, the last of `text`, from `prepare_inputs_for_generation`.

        transformers' default implementation takes a tenth of a small draft's pass and is skipped where it would
        change nothing.
        """
        if self.cache is None:
            tokens = text
        if self.passes and self._prepared:
            return {self._ids_key: tokens, self._cache_key: self.cache, **slot_kwargs, **self.kwargs}
        prepare = self.model.prepare_inputs_for_generation
        given = {
            self._cache_key: self.cache,
            **slot_kwargs,
            **self.kwargs,
            "is_first_iteration": self.read[0] < self._prompt_length,
        }
        if self.cache is None or not self._own_inputs:
            return prepare(tokens, **given)
        # `generate` passes a chunk of a prompt alone, and has no rows that are set aside, which may be longer.
        length = tokens.shape[1]
        if self._chunk is None or self.read[0] >= self._prompt_length:
            length += max(n for row, n in enumerate(self.read) if row not in self._aside)
        inputs = prepare(text[:, -length:], next_sequence_length=tokens.shape[1], **given)
        if inputs.get(self._cache_key) is None:  # the model drops its cache, such as Phi-3 at LongRoPE's switch
            cache_rollback.forget_all(self.cache)
            self._width, self.read = 0, [0] * len(self.read)  # until the pass has ended
            inputs = prepare(text, **given | {self._cache_key: None}) | {self._cache_key: self.cache}
        return inputs

    def _forget_last(self, count: int) -> None:
        if self._text is not None:
            self._text = self._text[:, : self._width - self.hidden - count]
        if self.cache is not None and self._width:
            cache_rollback.forget_last(self.cache, count, self._apart)
        self._width -= count

    def _slot_kwargs(self, lags: list[int], first_slot: int, last_slot: int) -> dict[str, Tensor]:
        """Mask, positions and token types of the slots from `first_slot` (masks: from 0) to `last_slot`."""
        ragged = any(lags)
        kwargs = {}
        mask = self._mask
        if ragged and mask is None and self._takes_mask:
            mask = self._ones
        if mask is not None:
            kwargs[self._mask_key] = _rows_at(mask, lags, 0, last_slot, before=0) if ragged else mask[:, :last_slot]
        tables = dict(self._per_token)
        if self._positions is not None:
            tables[self._position_key] = self._positions
        for key, table in tables.items():
            kwargs[key] = _rows_at(table, lags, first_slot, last_slot) if ragged else table[..., first_slot:last_slot]
        if self._aside and self._positions is not None:
            positions = kwargs[self._position_key]
            positions = positions.expand(*positions.shape[:-2], len(lags), -1).clone()
            positions[..., self._aside, self._width - last_slot :] = self._aside_position
            kwargs[self._position_key] = positions
        return kwargs


def in_chunks(tokens: Tensor, count: int, size: int | None) -> Sequence[Tensor]:
    """Split `tokens` `[B, k]` into passes of `size` tokens; the last holds `count` tokens and the rest of a chunk.

    This is transformers' `prefill_chunk_size`, with which a long prompt needs less memory.
    """
    whole = 0 if size is None else (tokens.shape[1] - count) // size * size
    return [*tokens[:, :whole].split(size or 1, dim=1), tokens[:, whole:]] if whole > 0 else [tokens]


def extend_mask(mask: Tensor | None, total: int) -> Tensor | None:
    """A prompt's mask `[B, P]`, extended by ones to `total` columns; None if nothing is masked."""
    if mask is None or bool((mask == 1).all()):
        return None
    return torch.cat([mask, mask.new_ones(mask.shape[0], max(total - mask.shape[1], 0))], dim=1)


def prompt_positions(mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Positions `[B or 1, length]`, as by `GenerationMixin._prepare_position_ids_for_generation`."""
    if mask is None:
        return torch.arange(length, device=device).unsqueeze(0)
    mask = mask[:, :length]
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def extend_count(positions: Tensor | None, total: int) -> Tensor | None:
    """Prompt positions `[..., P]`, continued to `total` columns."""
    if positions is None:
        return None
    more = max(total - positions.shape[-1], 0)
    return torch.cat([positions, positions[..., -1:] + 1 + torch.arange(more, device=positions.device)], dim=-1)


def _extend_types(key: str, types: Tensor, total: int) -> Tensor:
    """Token types `[..., P]`, extended to `total` as by `_update_model_kwargs_for_generation`."""
    more = max(total - types.shape[-1], 0)
    last = types[..., -1:]
    new = torch.zeros_like(last) if key == "mm_token_type_ids" else last
    return torch.cat([types, new.expand(*types.shape[:-1], more)], dim=-1)


def _rows_at(table: Tensor, lags: list[int], first: int, last: int, before: int | None = None) -> Tensor:
    """The columns of `table` `[..., B or 1, N]` in slots `first` to `last`, for rows shifted right by `lags`.

    Slots before a row's first token get its first column, or `before` if given.
    """
    lag = on_device(lags, table.device).unsqueeze(1)
    columns = torch.arange(first, last, device=table.device) - lag
    shape = (*table.shape[:-2], len(lags))
    taken = table.expand(*shape, -1).gather(-1, columns.clamp(min=0).expand(*shape, -1))
    return taken if before is None else taken.masked_fill(columns < 0, before)
