"""The choice of a call's cache: a static one where the model can read it, else one of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_specdec.models.cache_names import CACHE_NAME, cache_of
from hf_specdec.models.cache_rollback import holds_whole_text, new_cache
from hf_specdec.models.masks import attention_windows, takes_4d_masks, takes_one_causal_mask
from hf_specdec.models.own_inputs import takes_inputs_as_given
from hf_specdec.models.recorded_passes import recordable
from hf_specdec.models.static_cache import CacheSize, RowsCache
from hf_specdec.models.traits import text_prefix

LONG_TEXT = 4096  # tokens; for longer texts, models with sliding windows use caches that drop tokens
KNOWN_KWARGS = frozenset({"use_cache", "attention_mask", CACHE_NAME, "logits_to_keep"})
KNOWN_WITH_ENCODER = KNOWN_KWARGS | {"encoder_outputs", "decoder_attention_mask"}


def supports_rows_cache(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether a `RowsCache` can be used: the model accepts 4-D masks and per-row positions and is on one device.

    Of models with an encoder, Whisper's can: its encodings have one length, and its decoder sees all of them.
    """
    known = KNOWN_KWARGS if not model.config.is_encoder_decoder else KNOWN_WITH_ENCODER
    position_key = f"{text_prefix(model)}position_ids"
    positions = model_kwargs.get(position_key)
    return (
        takes_4d_masks(model)
        and takes_inputs_as_given(model)
        and len({weight.device for weight in model.parameters()}) == 1
        and (known | {position_key}).issuperset(key for key, value in model_kwargs.items() if value is not None)
        and (positions is None or positions.dim() == 2)
        and (not model.config.is_encoder_decoder or _encodes_windows(model, model_kwargs))
    )


def _encodes_windows(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether a model's encoder has read a window of fixed length, as Whisper's does."""
    encoding = encoding_of(model_kwargs)
    return encoding is not None and encoding.shape[1] == getattr(model.config, "max_source_positions", None)


def supports_recorded_row(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether a single row should use a `RowsCache` too, so that its passes can be recorded."""
    return supports_rows_cache(model, model_kwargs) and recordable(model)


def outgrows_windows(model: PreTrainedModel, tokens: int) -> bool:
    """Whether a dynamic cache uses much less memory, since it drops tokens that left the sliding windows."""
    windows = [window for window in attention_windows(model.config).values() if window]
    return bool(windows) and tokens > max(2 * max(windows), LONG_TEXT)


def static_cache(model: PreTrainedModel, model_kwargs: dict[str, Any], size: CacheSize, argument: str) -> Cache:
    """An empty cache for a call with static caches: a `RowsCache`, or a dynamic one for models that can't use it.

    Raises:
        ValueError: the model has its own kind of cache, which cannot be rolled back.
    """
    if supports_rows_cache(model, model_kwargs):
        encoding = encoding_of(model_kwargs)
        encoded = None if encoding is None else encoding.shape
        return RowsCache(model.config, size.capacity, grows=size.grows, encoded=encoded)
    return new_cache(model, argument, cross_attention="encoder_outputs" in model_kwargs)


def cache_taken_over(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> DynamicCache | None:
    """The caller's cache, if a `RowsCache` can take over its tokens for a call and return them; else None."""
    cache = cache_of(model_kwargs)
    serves = takes_one_causal_mask(model) and supports_rows_cache(model, model_kwargs)
    return cache if serves and holds_whole_text(cache) else None


def encoding_of(model_kwargs: dict[str, Any]) -> Tensor | None:
    """`[B, S, H]`, the encoder's output; None for decoder-only models."""
    outputs = model_kwargs.get("encoder_outputs")
    return None if outputs is None else outputs[0]
