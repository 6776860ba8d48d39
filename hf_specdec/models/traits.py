"""A model's properties, read from its configuration and the signature of `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from hf_specdec.models.recurrent_states import is_purely_recurrent


def pass_mode(*models: PreTrainedModel) -> type[torch.inference_mode] | type[torch.no_grad]:
    """The context manager for passes without gradients: `inference_mode`, about 10% faster, or `no_grad`.

    `no_grad` is for models with weights of a tensor subclass (quanto's int4, for instance), of which
    `inference_mode` can't make views. A cache written in `inference_mode` is copied before the caller gets it, see
    `cache_rollback.copy_out_of_inference_mode`.
    """
    plain = all(type(weight) is torch.nn.Parameter for model in models for weight in model.parameters())
    return torch.inference_mode if plain else torch.no_grad


def wrapped_model(model: Any) -> Any:
    """The model that runs `generate`: an adapter model (PEFT) wraps another one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# Prefixes of the arguments that pass pictures, video or sound to a model, encoded or not.
MEDIA = ("pixel_", "image_", "video_", "audio_", "input_features", "input_values", "mm_encoder_outputs")


def media_of(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model's arguments, those that hold pictures, video or sound; `generate` makes an empty one for texts."""
    found = {key: value for key, value in model_kwargs.items() if key.startswith(MEDIA) and value is not None}
    return {key: value for key, value in found.items() if not (isinstance(value, Mapping) and not value)}


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """`[n]`: integers, copied to CUDA without waiting for it: it stages pageable memory before the call returns."""
    return torch.tensor(numbers, device="cpu").to(device, non_blocking=device.type == "cuda")


def context_length(model: PreTrainedModel) -> int | None:
    """The most positions that the model supports (`max_position_embeddings`); None where it has no limit."""
    length: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return length


def has_default_inputs(model: PreTrainedModel) -> bool:
    """Whether a model leaves the preparation of a pass's arguments to transformers' default implementation."""
    return type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation


def takes_row_positions(model: PreTrainedModel) -> bool:
    """Whether the rows of one pass may be at different positions.

    They may if `forward` takes positions, if attention uses relative distances only (T5's buckets, ALiBi), or if there
    is none (Mamba).
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(model, "_is_stateful", False) and is_purely_recurrent(DynamicCache(config=config)):
        return True
    if hasattr(config, "relative_attention_num_buckets") or config.model_type in ("bloom", "mpt"):
        return True
    key = "decoder_position_ids" if model.config.is_encoder_decoder else "position_ids"
    return key in inspect.signature(model.forward).parameters


def tensor_parallel_group(*models: PreTrainedModel) -> Any:
    """The processes that hold the first of the models that is sharded together (`tp_plan`); None where none is."""
    for model in models:
        if (getattr(model, "_tp_size", None) or 1) > 1 and (mesh := getattr(model, "_device_mesh", None)) is not None:
            return mesh["tp"].get_group() if mesh.mesh_dim_names and "tp" in mesh.mesh_dim_names else mesh.get_group()
    return None


def vocabulary_size(model: PreTrainedModel) -> int:
    """V, the number of logits per position."""
    return model.config.get_text_config(decoder=True).vocab_size


def without_adapter_wrapper(model: Any) -> Any:
    """The model that a PEFT wrapper has put its adapters into, and which runs with them; other models unchanged.

    The wrapper's `forward` names neither positions nor caches. Only prompt learning needs the wrapper, which adds
    the virtual tokens.
    """
    adapter = getattr(model, "active_peft_config", None)
    if adapter is None or adapter.is_prompt_learning:
        return model
    return model.get_base_model()
