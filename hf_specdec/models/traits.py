"""A model's properties, read from its configuration and the signature of `forward`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from hf_specdec.compat import transformers_private
from hf_specdec.compat.transformers_private import is_stateful
from hf_specdec.models.recurrent_states import is_purely_recurrent

MAX_VOCABULARY_PADDING = 1024


def pass_mode(*models: PreTrainedModel) -> type[torch.inference_mode] | type[torch.no_grad]:
    """The context manager for passes without gradients: `inference_mode`, about 10% faster, or `no_grad`.

    `no_grad` is for models with weights of a tensor subclass (such as quanto's int4), which cannot have views in
    `inference_mode`. A cache written in `inference_mode` is copied before the caller gets it, see
    `cache_rollback.copy_out_of_inference_mode`.
    """
    plain = all(type(weight) is torch.nn.Parameter for model in models for weight in model.parameters())
    return torch.inference_mode if plain else torch.no_grad


def wrapped_model(model: Any) -> Any:
    """The model that runs `generate`, inside wrappers: PEFT's, compiled modules, DDP and others with a `module`."""
    model = _inside(model)
    return _inside(model.get_base_model()) if hasattr(model, "get_base_model") else model


def _inside(wrapper: Any) -> Any:
    """Unwrap a model down to PEFT's wrapper, if there is one.

    A compiled module exposes the `generate` of the module that it compiled; DDP and others hold a `module`.
    """
    if not isinstance(wrapper, Module) or isinstance(wrapper, PreTrainedModel):
        return wrapper
    held = getattr(getattr(wrapper, "generate", None), "__self__", None), getattr(wrapper, "module", None)
    return next((_inside(one) for one in held if isinstance(one, Module) and one is not wrapper), wrapper)


def generating_parts(model: Any) -> list[Any]:
    """The model or its parts whose `generate` is transformers' own and runs when the model's `generate` is called.

    That is the model itself, unless its class overrides `generate` without calling transformers', such as BLIP-2, which
    calls its language model's. This is decided by the names that occur with `generate` in the code of its methods.
    """
    model = wrapped_model(model)
    if not isinstance(model, Module):
        return []
    owners = [kind for kind in type(model).__mro__ if "generate" in vars(kind)]
    overrides = [kind for kind in owners if kind is not GenerationMixin]
    if len(overrides) < len(owners) and all(_goes_on(kind) for kind in overrides):
        return [model]
    named = {name for kind in overrides for method in _callers(kind) for name in method.__code__.co_names}
    parts = [part for name, part in model.named_modules() if name and name.rpartition(".")[2] in named]
    return [part for part in parts if isinstance(part, GenerationMixin) and generating_parts(part) == [part]]


def _goes_on(kind: type) -> bool:
    """Whether a method of a class calls the `generate` of another class, by the class's name or by `super`."""
    for method in _callers(kind):
        named = [method.__globals__.get(name) for name in method.__code__.co_names]
        if "super" in method.__code__.co_names or any(
            isinstance(one, type) and hasattr(one, "generate") for one in named
        ):
            return True
    return False


def _callers(kind: type) -> list[FunctionType]:
    """The methods of a class that name `generate`."""
    functions = (inspect.unwrap(getattr(value, "__func__", value)) for value in vars(kind).values())
    return [each for each in functions if isinstance(each, FunctionType) and "generate" in each.__code__.co_names]


# Prefixes of the arguments that pass pictures, video or sound to a model, encoded or not.
MEDIA = ("pixel_", "image_", "video_", "audio_", "input_features", "input_values", "mm_encoder_outputs")


def media_of(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A model's arguments that hold pictures, video or sound, without the empty one that `generate` makes for texts."""
    found = {key: value for key, value in model_kwargs.items() if key.startswith(MEDIA) and value is not None}
    return {key: value for key, value in found.items() if not (isinstance(value, Mapping) and not value)}


def drafts_blocks(model: Any) -> bool:
    """Whether a model, possibly wrapped, is a DFlash draft, which reads hidden states of a target."""
    return describes_block_draft(getattr(wrapped_model(model), "config", None))


def describes_block_draft(config: Any) -> bool:
    """Whether a configuration is that of a DFlash draft."""
    return all(hasattr(config, name) for name in ("block_size", "mask_token_id", "target_layer_ids"))


def reads_keys(model: PreTrainedModel) -> bool:
    """Whether a model is a draft that reads the target's keys, such as Gemma 4's assistants."""
    return hasattr(model.config, "backbone_hidden_size")


def embedded(model_kwargs: Mapping[str, Any]) -> bool:
    """Whether a part of the prompt reaches the model in another form than tokens."""
    return bool(media_of(model_kwargs)) or model_kwargs.get("inputs_embeds") is not None


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """`[n]`: integers, copied to CUDA without waiting for it: it stages pageable memory before the call returns."""
    return torch.tensor(numbers, device="cpu").to(device, non_blocking=device.type == "cuda")


def text_prefix(model: PreTrainedModel) -> str:
    """What precedes the names of arguments of `forward` that hold a text's tokens, masks and positions."""
    return "decoder_" if model.config.is_encoder_decoder else ""


def context_length(model: PreTrainedModel) -> int | None:
    """The number of positions that the model supports; None if it has no limit."""
    config = model.config.get_text_config(decoder=True)
    lengths = (getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    return next((length for length in lengths if length is not None), None)


# Outputs that a configuration can request and decoding never reads. Some are computed assuming a 2-D mask.
UNREAD = ("output_router_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model's passes: logits, without further outputs that its configuration requests.

    Args:
        keeps_logits: whether `forward` can return the last logits only (`logits_to_keep`).
        unread: arguments that disable or request other outputs.
    """

    keeps_logits: bool
    unread: Mapping[str, Any]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Outputs:
        """The outputs of a model in its present configuration."""
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        configs = (model.config, model.config.get_text_config(decoder=True))
        asked = [name for name in UNREAD if any(getattr(config, name, False) for config in configs)]
        unread = {name: False for name in asked if takes_any or name in parameters}
        return cls("logits_to_keep" in parameters, unread)

    def with_hidden_states(self, layers: Sequence[int]) -> Outputs:
        """These outputs plus the hidden states of some layers, by index."""
        asked = list(layers) if transformers_private.hands_out_chosen_layers() else True
        return replace(self, unread={**self.unread, "output_hidden_states": asked})

    def last(self, count: int | None) -> dict[str, Any]:
        """The arguments of a pass that returns at least the last `count` logits; all if None."""
        return {**self.unread, "logits_to_keep": count} if self.keeps_logits and count is not None else {**self.unread}


def has_default_inputs(model: PreTrainedModel) -> bool:
    """Whether a model uses transformers' default implementation to prepare a pass's arguments."""
    return type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation


def takes_row_positions(model: PreTrainedModel) -> bool:
    """Whether the rows of one pass may be at different positions.

    They may if `forward` accepts positions, if attention uses only relative distances (T5's buckets, ALiBi), or if
    there is no attention (Mamba).
    """
    config = model.config.get_text_config(decoder=True)
    if is_stateful(model) and is_purely_recurrent(DynamicCache(config=config)):
        return True
    if hasattr(config, "relative_attention_num_buckets") or config.model_type in ("bloom", "mpt"):
        return True
    return f"{text_prefix(model)}position_ids" in inspect.signature(model.forward).parameters


def unmasked_window(model: PreTrainedModel, cache: Any) -> int | None:
    """The window that only the cache enforces, by dropping tokens that the model does not mask (Moshi); else None.

    A pass over several tokens keeps them until all have been read. The model's code is searched for such masks.
    """
    windows = [layer.sliding_window for layer in getattr(cache, "layers", ()) if getattr(layer, "sliding_window", None)]
    spaces = {sys.modules.get(type(part).__module__) for part in model.modules()} if windows else set()
    names = (name for space in spaces if space is not None for name in vars(space) if "mask" in name)
    if not windows or any(kind in name for name in names for kind in ("sliding", "chunked", "_4d_")):
        return None
    return min(windows)


def padding_without_position(model: PreTrainedModel) -> int | None:
    """The padding token, for models that count positions by a pass's tokens and skip it; else None."""
    decoder = model.get_decoder() or model
    counting = (part for part in decoder.modules() if hasattr(part, "create_position_ids_from_input_ids"))
    padding: int | None = getattr(next(counting, None), "padding_idx", None)
    return padding


# The fields of configurations that hold the ids of placeholders.
PLACEHOLDERS = tuple(f"{kind}_token_{name}" for kind in ("image", "video", "audio") for name in ("id", "index"))


def keeps_pictures_apart(model: PreTrainedModel) -> bool:
    """Whether a model handles pictures outside its text, with its own positions and masks.

    GIT reads them before the text, Idefics by cross-attention.
    """
    if "pixel_values" not in inspect.signature(model.forward).parameters or model.config.is_encoder_decoder:
        return False
    return not any(isinstance(getattr(model.config, name, None), int) for name in PLACEHOLDERS)


def tensor_parallel_group(*models: PreTrainedModel) -> Any:
    """The process group of the first model that is sharded by tensor parallelism (`tp_plan`); None if none is."""
    groups = map(transformers_private.tensor_parallel_group, models)
    return next((group for group in groups if group is not None), None)


def vocabulary_size(model: PreTrainedModel) -> int:
    """V, the number of logits per position."""
    return model.config.get_text_config(decoder=True).vocab_size


def drafting_model(model: Any) -> Any:
    """The model that drafts if `model` was passed as the draft: its generating part, or the wrapped model."""
    inner = without_adapter_wrapper(model)
    parts = generating_parts(inner) if isinstance(inner, PreTrainedModel) else []
    return parts[0] if len(parts) == 1 else inner


def without_adapter_wrapper(model: Any) -> Any:
    """The model inside its wrappers, see `wrapped_model`, with the adapters that PEFT has inserted.

    The signature of PEFT's `forward` shows neither positions nor caches. Only prompt learning needs the wrapper, which
    adds the virtual tokens.
    """
    model = _inside(model)
    adapter = getattr(model, "active_peft_config", None)
    if adapter is None or adapter.is_prompt_learning:
        return model
    return wrapped_model(model)
