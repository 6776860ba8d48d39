"""What a model is like, read off its configuration and its `forward`: vocabulary, context, positions, weights."""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel


def pass_mode(*models: PreTrainedModel) -> type[torch.inference_mode] | type[torch.no_grad]:
    """How passes are kept from recording gradients: `inference_mode`, a tenth faster, or `no_grad`.

    A cache that the caller keeps is copied out of the former (`cache.release`). The latter is for weights of a
    tensor class of their own, int4 of quanto among them, of which inference mode can't make views.
    """
    plain = all(type(weight) is torch.nn.Parameter for model in models for weight in model.parameters())
    return torch.inference_mode if plain else torch.no_grad


def context_length(model: PreTrainedModel) -> int | None:
    """The positions that a model has tables for, or was trained on; None where nothing bounds them."""
    length: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return length


def takes_row_positions(model: PreTrainedModel) -> bool:
    """Whether the rows of one pass may stand at different positions.

    They may where positions are an argument, and where attention knows distances only (T5's buckets, ALiBi).
    """
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "relative_attention_num_buckets") or config.model_type in ("bloom", "mpt"):
        return True
    key = "decoder_position_ids" if model.config.is_encoder_decoder else "position_ids"
    return key in inspect.signature(model.forward).parameters


def vocabulary_size(model: PreTrainedModel) -> int:
    """V: the number of scores that the model gives each position."""
    return model.config.get_text_config(decoder=True).vocab_size
