"""Rolling back transformers' caches, row by row.

After a round each row keeps a different number of cached tokens, but all rows of such a cache share one slot axis.
So rows are shifted until their last kept tokens are in the same slot, and the slots freed on the left are masked like
padding. Distances within a row don't change, and relative positions, ALiBi and sliding windows depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, TypeGuard

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_specdec.compat.transformers_private import is_callers_cache, is_stateful
from hf_specdec.models.recurrences import places
from hf_specdec.models.recurrent_states import LINEAR_LAYERS, is_purely_recurrent, recurrent_layers

# transformers uses empty dummy layers where a layer shares another layer's keys.
REWINDABLE_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    *(
        getattr(cache_utils, name)
        for name in ("DummyLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
        if hasattr(cache_utils, name)
    ),
)


def new_cache(model: PreTrainedModel, argument: str, *, cross_attention: bool) -> Cache:
    """An empty cache for a model's decoder that can be rolled back by any number of passes.

    Every layer keeps all tokens, even if its attention has a window: transformers' sliding layers (5.17) allow one
    pass between two calls of `crop`, and drafting makes several.

    Args:
        model: the model.
        argument: the name of the argument that passed it.
        cross_attention: whether its decoder attends to an encoder.

    Raises:
        ValueError: the model has its own kind of cache, which cannot be rolled back.
    """
    named = f"{argument}={type(model).__name__}"
    by_layer = DynamicCache(config=model.config.get_text_config(decoder=True))
    check_rewindable(by_layer, named)
    if recurrent_layers(by_layer):
        return by_layer
    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if cross_attention else DynamicCache()


def check_rewindable(cache: object, argument: str) -> None:
    """Refuse a cache that cannot forget its last tokens.

    Layers are checked by their exact class, because quantized layers inherit `is_croppable=True` and a `crop` that
    ignores their quantized part.

    Args:
        cache: any cache of transformers.
        argument: the argument that passed it, with its value, for the message.

    Raises:
        ValueError: names the argument, the cache's class and the way out.
    """
    layers = getattr(self_attention(cache), "layers", None)
    lazily_dynamic = isinstance(self_attention(cache), DynamicCache) and not layers
    if lazily_dynamic or (layers and all(type(layer) in REWINDABLE_LAYERS for layer in layers)):
        return
    if cache is None:
        raise ValueError(
            f"{argument}: it uses its own kind of cache, which can't be rolled back after a rejected draft: choose "
            "another model, or decode without speculation."
        )
    odd = sorted({type(layer).__name__ for layer in layers or () if type(layer) not in REWINDABLE_LAYERS})
    raise ValueError(
        f"{argument}: its cache {type(cache).__name__}({', '.join(odd)}) can't be rolled back, which speculation "
        "needs after each rejected draft: use cache_implementation='dynamic' (the default), use_cache=False, or "
        "decode without speculation."
    )


def check_recurrence(model: PreTrainedModel, argument: str) -> None:
    """Refuse a model whose recurrent states cannot be kept for each token.

    Args:
        model: any model.
        argument: the argument of `generate` that passed it.

    Raises:
        ValueError: names the argument, its value and the way out.
    """
    if not is_stateful(model) or (has_recurrent_layers(model) and places(model)):
        return
    raise ValueError(
        f"{argument}={type(model).__name__} keeps a recurrent state that can't be rolled back after a rejected draft: "
        "choose another model (docs/families.md lists those that work), or decode without speculation."
    )


def has_recurrent_layers(model: PreTrainedModel) -> bool:
    """Whether the model's cache holds states of recurrent layers."""
    return is_stateful(model) and bool(
        recurrent_layers(DynamicCache(config=model.config.get_text_config(decoder=True)))
    )


def cached_length(cache: Cache, argument: str) -> int:
    """The number of tokens that a cache holds.

    Args:
        cache: any cache that `check_rewindable` accepts.
        argument: the argument that passed it, for the message.

    Raises:
        ValueError: it is filled and has recurrent layers only, so its length is unknown.
    """
    if not is_purely_recurrent(self_attention(cache)):
        return int(cache.get_seq_length())
    if cache.has_previous_state():
        raise ValueError(
            f"{argument}={type(cache).__name__} is filled, and the length of its text can't be told from recurrent "
            f"states: leave {argument} out and pass the whole text, or decode without speculation."
        )
    return 0


def is_static_by_request(cache: object) -> bool:
    """Whether `generate` made this cache for `cache_implementation="static"`, so that a `RowsCache` can replace it."""
    own = self_attention(cache)
    return isinstance(own, StaticCache) and not own.offloading and not is_callers_cache(cache)


def is_unused_default(cache: object) -> bool:
    """Whether `generate` made this cache by default, so that any other can replace it."""
    own = self_attention(cache)
    if not isinstance(own, DynamicCache) or is_callers_cache(cache) or is_purely_recurrent(own):
        return False
    return type(own) is DynamicCache and not own.offloading and own.get_seq_length() == 0


def holds_whole_text(cache: object) -> TypeGuard[DynamicCache]:
    """Whether the caller passed this cache and its layers keep all tokens, so that a `RowsCache` can take them over."""
    if not isinstance(cache, DynamicCache) or type(cache) is not DynamicCache or not is_callers_cache(cache):
        return False
    return not cache.offloading and all(type(layer) is DynamicLayer for layer in cache.layers)


def start_recording(cache: Cache) -> list[Any]:
    """Make sliding-window layers keep the tokens of a pass until `crop` drops some of them.

    Returns:
        The layers that changed, for `stop_recording`.
    """
    idle = [layer for layer in self_attention(cache).layers if getattr(layer, "record_past", None) is False]
    cache.activate_past_recording()
    return idle


def stop_recording(layers: Sequence[Any]) -> None:
    """Undo `start_recording` for layers that have been cropped to their windows."""
    for layer in layers:
        layer.record_past = False


def layers_apart(cache: Cache) -> frozenset[int]:
    """The indices of layers that don't grow with the text, such as a cross-attention's with a picture's keys.

    transformers uses the length of the first layer as that of the text.
    """
    if recurrent_layers(self_attention(cache)):
        return frozenset()
    length = cache.get_seq_length()
    layers = enumerate(self_attention(cache).layers)
    return frozenset(number for number, layer in layers if _holds(layer) and layer.get_seq_length() != length)


def forget_broken_pass(cache: Cache, width: int, apart: Set[int] = frozenset()) -> None:
    """Cut every layer to `width` slots after a pass that may have been interrupted between layers."""
    for layer in _holding(cache, apart):
        if (excess := layer.get_seq_length() - width) > 0:
            _crop_attention(layer, excess)


def can_forget(cache: Cache, width: int, count: int, apart: Set[int] = frozenset()) -> bool:
    """Whether all layers still hold enough tokens after dropping the last `count` of `width` slots."""
    for layer in _holding(cache, apart):
        needed = width
        if isinstance(layer, DynamicSlidingWindowLayer):
            needed = count + min(width - count, layer.sliding_window - 1)
        if layer.keys.shape[-2] < needed:
            return False
    return True


def forget_all(cache: Cache) -> None:
    """Empty the part of a cache that grows with the generated text."""
    for layer in _holding(cache):
        # In transformers 5.17 `reset` zeroes the tensors instead, which keeps their length.
        layer.keys = layer.values = None
        layer.is_initialized = False
    self_attention(cache).reset()


def forget_last(cache: Cache, count: int, apart: Set[int] = frozenset()) -> None:
    """Drop the last `count` tokens of every row; sliding windows are cut to size even at 0.

    Recurrent layers are handled by `recurrent_states`; layers `apart` from the text are unchanged.
    """
    if not recurrent_layers(cache) and not apart:
        cache.crop(-count)
        return
    for layer in _holding(cache, apart):
        _crop_attention(layer, count)


def realign(cache: Cache, width: int, shifts: Sequence[int], new_width: int, apart: Set[int] = frozenset()) -> None:
    """Shift each row along the slot axis and set the axis' length.

    Args:
        cache: any cache that `check_rewindable` accepts; cross-attention is unchanged.
        width: the current number of slots.
        shifts: `[B]`, by how many slots a row moves right (negative: left).
        new_width: the new number of slots. Content moved past it is dropped; slots freed on the left hold arbitrary
            finite numbers and must be masked.
        apart: see `layers_apart`; they are unchanged.
    """
    for layer in _holding(cache, apart):
        stored = layer.keys.shape[-2]
        kept = new_width
        if isinstance(layer, DynamicSlidingWindowLayer):
            kept = min(new_width, layer.sliding_window - 1)
            layer.cumulative_length = new_width
        source = _source_slots(shifts, width - stored, range(new_width - kept, new_width), stored, layer.keys.device)
        layer.keys = _take(layer.keys, source)
        layer.values = _take(layer.values, source)


def copy_out_of_inference_mode(cache: Cache) -> None:
    """Replace tensors written in `torch.inference_mode` by ordinary ones, which autograd can save."""
    parts = (
        [cache.self_attention_cache, cache.cross_attention_cache] if isinstance(cache, EncoderDecoderCache) else [cache]
    )
    for layer in (layer for part in parts for layer in _holding(part)):
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    for layer in recurrent_layers(cache):
        for states in (layer.conv_states, layer.recurrent_states):
            states |= {at: state.clone() for at, state in states.items() if state is not None}


def shift_rows(rows: torch.Tensor, shifts: Sequence[int], new_width: int) -> torch.Tensor:
    """`realign` for a tensor `[B, width]` of tokens, used without a cache."""
    source = _source_slots(shifts, 0, range(new_width), rows.shape[1], rows.device)
    return rows.gather(1, source)


def self_attention(cache: Any) -> Any:
    """The part of a cache that grows with the generated text."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _holding(cache: Any, apart: Set[int] = frozenset()) -> list[Any]:
    """The layers that hold tokens, except those `apart`."""
    layers = enumerate(self_attention(cache).layers)
    return [layer for number, layer in layers if number not in apart and _holds(layer)]


def _holds(layer: Any) -> bool:
    """Whether a layer holds tokens: it is initialized, has its own keys, and is not only recurrent."""
    return getattr(layer, "is_initialized", False) and layer.keys is not None


def _crop_attention(layer: Any, count: int) -> None:
    """Forget the last `count` tokens of a layer's attention."""
    if isinstance(layer, LINEAR_LAYERS):
        DynamicLayer.crop(layer, -count)
    else:
        layer.crop(-count)


def _source_slots(shifts: Sequence[int], first: int, slots: range, stored: int, device: torch.device) -> torch.Tensor:
    """`[B, len(slots)]`: the index of each new slot's content in the stored part, clamped to it."""
    wanted = torch.tensor([slots.start - first - shift for shift in shifts], device=device).unsqueeze(1)
    return (wanted + torch.arange(len(slots), device=device)).clamp_(0, stored - 1)


def _take(states: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Gather `[B, H, new, D]` from `[B, H, stored, D]` by the slots in `source` `[B, new]`."""
    index = source[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)
