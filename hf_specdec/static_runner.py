"""One model's passes over rows of uneven length, in a static cache: the rows never move.

The same interface as `runner.ModelRunner`. Masks are built from slots, padding and windows, positions are looked up
by slot, so that a ragged batch costs what an even one costs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedModel

from hf_specdec.cache import new_cache
from hf_specdec.masks import attention_mask, attention_windows, takes_ready_masks
from hf_specdec.runner import extend_count, extend_mask, pass_mode, prompt_positions
from hf_specdec.static_cache import CacheSize, RowsCache

Masks = Tensor | dict[str, Tensor] | None

KNOWN_KWARGS = frozenset({"use_cache", "attention_mask", "position_ids", "past_key_values", "logits_to_keep"})


def keeps_rows(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether a model can be fed from a `RowsCache`.

    It has to take ready masks and positions for every row, and to stand on one device.
    """
    positions = model_kwargs.get("position_ids")
    return (
        takes_ready_masks(model)
        and type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
        and len({weight.device for weight in model.parameters()}) == 1
        and KNOWN_KWARGS.issuperset(key for key, value in model_kwargs.items() if value is not None)
        and (positions is None or positions.dim() == 2)
    )


def static_cache(model: PreTrainedModel, model_kwargs: dict[str, Any], size: CacheSize, argument: str) -> Cache:
    """An unused cache for a call that wants a static one: a `RowsCache` where the model can be fed from it.

    Raises:
        ValueError: neither that nor transformers' dynamic cache can be rolled back.
    """
    if keeps_rows(model, model_kwargs):
        return RowsCache(model.config, size.capacity, grows=size.grows)
    return new_cache(model, argument, cross_attention="encoder_outputs" in model_kwargs)


class StaticRunner:
    """Feeds one decoder-only model from a `RowsCache`; the methods are those of `ModelRunner`.

    Args:
        model: one that `keeps_rows`.
        model_kwargs: what `generate` prepared for the model, with an unused `RowsCache` as `past_key_values`.
        input_ids: `[B, P]` prompts; only their shape and device count here.

    Attributes:
        visible: `[B, capacity]` bool, slots that hold no padding.
        positions: `[B, capacity]`, the position of a token in each slot.
        windows: see `attention_windows`.
        keeps_logits: whether the model can be asked for the last logits only.
    """

    def __init__(self, model: PreTrainedModel, model_kwargs: dict[str, Any], input_ids: Tensor) -> None:
        self.model = model
        self.passes = 0
        self.cache: RowsCache = model_kwargs["past_key_values"]
        batch_size, prompt_length = input_ids.shape
        self.read = [0] * batch_size
        capacity = self.cache.capacity
        self._padding = mask = extend_mask(model_kwargs.get("attention_mask"), capacity)
        positions = model_kwargs.get("position_ids")
        if positions is None:
            positions = prompt_positions(mask, prompt_length, input_ids.device)
        positions = extend_count(positions, capacity)
        assert positions is not None
        self.positions = positions.expand(batch_size, -1)
        self.visible = input_ids.new_ones(batch_size, capacity).bool() if mask is None else mask.bool()
        self.windows = attention_windows(model.config)
        self._mode = pass_mode(model)
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """As `ModelRunner.forward`."""
        tokens = tokens.to(self.positions.device)
        width = tokens.shape[1]
        slots = torch.tensor(self.read, device=tokens.device).unsqueeze(1) + torch.arange(width, device=tokens.device)
        span = max(self.read) + width
        with self._mode():
            logits = masked_pass(
                self.model,
                self.cache,
                tokens,
                slots,
                self.positions,
                self._masks(slots, span),
                span=span,
                count=count if self.keeps_logits else None,
            )
        self.passes += 1
        self.read = [n + width for n in self.read]
        return logits if logits.shape[1] == count else logits[:, -count:]

    def _masks(self, slots: Tensor, span: int) -> Masks:
        """The masks of a pass; the first one, over all pairs of the prompt's tokens, is left to the model to make."""
        if self.passes:
            return slot_masks(slots, self.visible[:, :span], self.windows, self.model.dtype)
        return None if self._padding is None else self._padding[:, :span]

    def rewind(self, lengths: Sequence[int]) -> None:
        """As `ModelRunner.rewind`; no data is touched."""
        self.read = [min(n, length) for n, length in zip(self.read, lengths, strict=True)]

    def end(self, length: int) -> None:
        """As `ModelRunner.end`."""
        self.rewind([length] * len(self.read))


def slot_masks(slots: Tensor, visible: Tensor, windows: dict[str, int | None], dtype: torch.dtype) -> Masks:
    """Ready masks as a model takes them: one, or one for each kind of its layers; see `attention_mask`."""
    masks = {kind: attention_mask(slots, visible, window, dtype) for kind, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


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
    count: int | None,
) -> Tensor:
    """One forward pass that writes into given slots; a plain function of tensors, to be captured or compiled.

    Args:
        tokens, slots: `[B, k]`.
        positions, visible: `[B, capacity]`, by slot.
        windows: see `attention_windows`.
        span: slots that attention looks at.
        count: positions to give logits for; None for all.

    Returns:
        Logits `[B, count, V]`.
    """
    masks = slot_masks(slots, visible[:, :span], windows, model.dtype)
    return masked_pass(model, cache, tokens, slots, positions, masks, span=span, count=count)


def masked_pass(
    model: PreTrainedModel,
    cache: RowsCache,
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    masks: Masks,
    *,
    span: int,
    count: int | None,
) -> Tensor:
    """`static_pass` with masks at hand: ready ones, or in a first pass what `generate` was given."""
    cache.slots.written, cache.slots.span = slots, span
    kept = {} if count is None else {"logits_to_keep": count}
    logits: Tensor = model(
        input_ids=tokens,
        attention_mask=masks,
        position_ids=positions.gather(1, slots),
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
        **kept,
    ).logits
    return logits
