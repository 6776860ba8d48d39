"""Rolling back the caches of transformers: what can be, and how, row by row.

After a round each row keeps a different number of its cached tokens. All rows of a cache of transformers share
one slot axis, so the rows are moved until their last kept tokens share a slot again; the slots that open up on
the left are hidden by the attention mask, as padding is. Distances between slots within a row never change,
which is all that relative positions, ALiBi and sliding windows ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Dummies hold nothing; transformers puts them where a layer uses another's keys.
REWINDABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))


def new_cache(model: PreTrainedModel, argument: str, *, cross_attention: bool) -> Cache:
    """An empty cache for a model's decoder that any number of passes can be rolled back in.

    Every layer keeps all its tokens, also where attention is windowed by its mask: between two calls of `crop`
    transformers' sliding layers take one pass (5.17), a drafting loop makes several.

    Args:
        model: the model.
        argument: the argument of `generate` that it came by.
        cross_attention: whether its decoder reads an encoding.

    Raises:
        ValueError: the model's own kind of cache can't be rolled back.
    """
    named = f"{argument}={type(model).__name__}"
    check_rewindable(DynamicCache(config=model.config.get_text_config(decoder=True)), named)
    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if cross_attention else DynamicCache()


def check_rewindable(cache: object, argument: str) -> None:
    """Refuse a cache that cannot forget its last tokens.

    Layers are judged by their exact class: quantized layers inherit `is_croppable=True` and a `crop` that
    leaves their quantized part behind.

    Args:
        cache: any cache of transformers.
        argument: the argument that it came by, with its value, as the message names it.

    Raises:
        ValueError: names the argument, the cache's class and the way out.
    """
    layers = getattr(self_attention(cache), "layers", None)
    lazily_dynamic = isinstance(self_attention(cache), DynamicCache) and not layers
    if lazily_dynamic or (layers and all(type(layer) in REWINDABLE_LAYERS for layer in layers)):
        return
    odd = sorted({type(layer).__name__ for layer in layers or () if type(layer) not in REWINDABLE_LAYERS})
    raise ValueError(
        f"{argument}: its cache {type(cache).__name__}({', '.join(odd)}) can't be rolled back, which speculation "
        "needs after each rejected draft: use cache_implementation='dynamic' (the default), use_cache=False, or "
        "decode without speculation; models with a recurrent state can't speculate."
    )


def is_static_by_request(cache: object) -> bool:
    """Whether `generate` made this cache, for `cache_implementation="static"`; it is unused, ours takes its place."""
    own = self_attention(cache)
    return isinstance(own, StaticCache) and not own.offloading and not getattr(cache, "_is_user_defined", False)


def is_unused_default(cache: object) -> bool:
    """Whether `generate` made this cache because nothing else was asked for; then any other may take its place."""
    if not isinstance(cache, DynamicCache) or getattr(cache, "_is_user_defined", False):
        return False
    return type(cache) is DynamicCache and not cache.offloading and cache.get_seq_length() == 0


def start_recording(cache: Cache) -> list[Any]:
    """Have sliding-window layers hold the tokens of a pass until they are kept or forgotten.

    Returns:
        The layers that did not before, for `stop_recording`.
    """
    idle = [layer for layer in self_attention(cache).layers if getattr(layer, "record_past", None) is False]
    cache.activate_past_recording()
    return idle


def stop_recording(layers: Sequence[Any]) -> None:
    """Have sliding-window layers, cut to their windows, keep no more than these in later passes."""
    for layer in layers:
        layer.record_past = False


def forget_broken_pass(cache: Cache, width: int) -> None:
    """Bring every layer back to `width` slots after a pass that may have ended before its last layer."""
    for layer in _holding(cache):
        if (excess := layer.get_seq_length() - width) > 0:
            layer.crop(-excess)


def can_forget(cache: Cache, width: int, count: int) -> bool:
    """Whether all layers hold `width` slots, and what windows see after their last `count` are forgotten."""
    for layer in _holding(cache):
        needed = width
        if isinstance(layer, DynamicSlidingWindowLayer):
            needed = count + min(width - count, layer.sliding_window - 1)
        if layer.keys.shape[-2] < needed:
            return False
    return True


def forget_all(cache: Cache) -> None:
    """Empty the part of a cache that grows with the decoded text."""
    self_attention(cache).reset()


def forget_last(cache: Cache, count: int) -> None:
    """Forget the last `count` cached tokens of every row; sliding windows shrink to their size even at 0."""
    cache.crop(-count)


def realign(cache: Cache, width: int, shifts: Sequence[int], new_width: int) -> None:
    """Move each row along the slot axis and set the axis' length.

    Args:
        cache: any cache that `check_rewindable` lets through; cross-attention is left alone.
        width: slots of the cache now.
        shifts: `[B]`, slots by which a row moves right (negative: left).
        new_width: slots afterwards; what a row moves beyond them is forgotten, what opens up on the left
            holds arbitrary finite numbers, to be masked.
    """
    for layer in _holding(cache):
        stored = layer.keys.shape[-2]
        kept = new_width
        if isinstance(layer, DynamicSlidingWindowLayer):
            kept = min(new_width, layer.sliding_window - 1)
            layer.cumulative_length = new_width
        source = _source_slots(shifts, width - stored, range(new_width - kept, new_width), stored, layer.keys.device)
        layer.keys = _take(layer.keys, source)
        layer.values = _take(layer.values, source)


def copy_out_of_inference_mode(cache: Cache) -> None:
    """Turn what `torch.inference_mode` wrote into ordinary tensors, which autograd may save, too."""
    parts = (
        [cache.self_attention_cache, cache.cross_attention_cache] if isinstance(cache, EncoderDecoderCache) else [cache]
    )
    for layer in (layer for part in parts for layer in _holding(part)):
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def shift_rows(rows: torch.Tensor, shifts: Sequence[int], new_width: int) -> torch.Tensor:
    """`realign` for a plain tensor `[B, width]`, as used without a cache."""
    source = _source_slots(shifts, 0, range(new_width), rows.shape[1], rows.device)
    return rows.gather(1, source)


def self_attention(cache: Any) -> Any:
    """The part of a cache that grows with the decoded text."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _holding(cache: Any) -> list[Any]:
    """The layers that hold tokens: not those that no pass has reached, nor those that use another's keys."""
    return [layer for layer in self_attention(cache).layers if layer.is_initialized and layer.keys is not None]


def _source_slots(shifts: Sequence[int], first: int, slots: range, stored: int, device: torch.device) -> torch.Tensor:
    """`[B, len(slots)]`: for each new slot the index of its content in the stored part, clamped into it."""
    wanted = torch.tensor([slots.start - first - shift for shift in shifts], device=device).unsqueeze(1)
    return (wanted + torch.arange(len(slots), device=device)).clamp_(0, stored - 1)


def _take(states: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Gather `[B, H, new, D]` from `[B, H, stored, D]` along the slots that `source` `[B, new]` names."""
    index = source[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)
