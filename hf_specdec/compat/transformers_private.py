"""The private parts of transformers that the package uses. Seen in transformers 5.17 to 5.24."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    PrefixConstrainedLogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)

# Arguments that runners extend along the text or keep unchanged.
CONTINUED = frozenset(
    {
        "attention_mask",
        "cross_attention_mask",
        "image_attention_mask",
        "image_hidden_states",
        "token_type_ids",
        "use_cache",
    }
)


def attention_name(config: PreTrainedConfig) -> str:
    """The attention implementation in use: "sdpa", "eager" or another. Models read the same attribute."""
    return str(config._attn_implementation)


def share_attention(config: PreTrainedConfig, part: PreTrainedConfig) -> None:
    """Give the configuration of a model's part the attention implementation of the model's."""
    part._attn_implementation = config._attn_implementation


def hands_out_chosen_layers() -> bool:
    """Whether `output_hidden_states` accepts indices of layers. Otherwise, all layers' states are returned."""
    return Version(transformers.__version__).release >= (5, 23)


def is_callers_cache(cache: object) -> bool:
    """Whether the caller passed this cache. Without the flag, every cache counts as made by `generate`."""
    return bool(getattr(cache, "_is_user_defined", False))


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether a model keeps recurrent states. Without the flag, only its cache's layers decide."""
    return bool(getattr(model, "_is_stateful", False))


def compiles_whole(model: PreTrainedModel) -> bool:
    """Whether transformers supports static caches for a model. Without the flag, dynamic ones are used."""
    return bool(getattr(model, "_can_compile_fullgraph", False))


def supports_sdpa(model: PreTrainedModel) -> bool:
    """Whether a model's class has SDPA attention. Without the flag, Better Transformer is refused."""
    return bool(getattr(model, "_supports_sdpa", False))


def can_set_attention(model: PreTrainedModel) -> bool:
    """Whether `set_attn_implementation` takes effect. Without the method, Better Transformer is refused."""
    return hasattr(model, "_can_set_attn_implementation") and bool(model._can_set_attn_implementation())


def pad_token(generation_config: GenerationConfig) -> int | None:
    """The padding token that `generate` has chosen. Without its tensor, the one that the caller or the model set."""
    pad = getattr(generation_config, "_pad_token_tensor", generation_config.pad_token_id)
    return None if pad is None else int(pad)


def mask_length(generation_config: GenerationConfig, default: int) -> int:
    """The length of a mask of ones that `generate` has left out; `default` if it is unknown."""
    return int(getattr(generation_config, "_mask_length", default))


def unknown_arguments(model: PreTrainedModel, arguments: Mapping[str, Any]) -> list[str]:
    """The arguments that neither `generate` nor the model accepts; empty without transformers' check."""
    check = getattr(model, "_validate_model_kwargs", None)
    return [] if check is None else [name for name, value in arguments.items() if _refuses(check, {name: value})]


def _refuses(check: Callable[[dict[str, Any]], None], argument: dict[str, Any]) -> bool:
    try:
        check(argument)
    except ValueError:
        return True
    return False


def own_loop(model: PreTrainedModel) -> str | None:
    """The method with which a model replaces a part of the decoding loop; None if it has none."""
    names = ("_sample", "_prefill")
    return next((n for n in names if getattr(type(model), n, None) is not getattr(GenerationMixin, n, None)), None)


def steered_by(model: PreTrainedModel) -> list[str]:
    """The values, other than a mask along the text, that a model passes on from one pass to the next.

    Keyword arguments, and attributes of the model, by the names in the code of its own
    `_update_model_kwargs_for_generation`, which plain `generate` calls after every token. Without the method, nothing.
    """
    found: set[str] = set()
    for kind in type(model).__mro__:
        method: Any = inspect.unwrap(vars(kind).get("_update_model_kwargs_for_generation", steered_by))
        if kind is not GenerationMixin and method is not steered_by:
            found.update(name for name in method.__code__.co_consts if isinstance(name, str) and name.isidentifier())
            found.update(one.argval for one in dis.get_instructions(method) if one.opname == "STORE_ATTR")
    return sorted(found - CONTINUED)


def allowed_tokens_of(constraint: PrefixConstrainedLogitsProcessor) -> Callable[[int, Tensor], list[int]]:
    """The `prefix_allowed_tokens_fn` that a constraint calls."""
    return constraint._prefix_allowed_tokens_fn


def encoded_pictures(model: PreTrainedModel, media: dict[str, Any], prompts: Tensor, copies: int) -> Any:
    """Encode pictures as a model's own `generate` does.

    Args:
        model: the model that encodes them.
        media: the arguments that hold them, on its device.
        prompts: `[B, L]`, one row per prompt.
        copies: the sequences of a prompt.
    """
    encoded = model._prepare_multimodal_encoder_kwargs_for_generation(media)
    return model._expand_inputs_for_generation(copies, input_ids=prompts, **encoded)[1]["mm_encoder_outputs"]


def tensor_parallel_group(model: PreTrainedModel) -> Any:
    """The group of processes that share a model (`tp_plan`); None if it is not sharded, or without the attribute."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) < 2:
        return None
    return mesh["tp"].get_group() if mesh.mesh_dim_names and "tp" in mesh.mesh_dim_names else mesh.get_group()


def mark_initialized(weight: Tensor) -> None:
    """Protect a weight from the model's later initialization. Without the mark, it is drawn again."""
    setattr(weight, "_is_hf_initialized", True)  # noqa: B010 (tensors have no such attribute for a type checker)


def use_one_gpu(arguments: Any) -> None:
    """Train on one GPU of several. Without the attribute, the trainer spreads a batch over all."""
    arguments._n_gpu = 1


def compiled_on_any_device() -> CompileConfig:
    """Settings with which `generate` compiles passes over static caches on any device; without the flag, on GPUs."""
    config = CompileConfig(mode="default")
    config._compile_all_devices = True
    return config


def makes_own_processors(model: Any) -> bool:
    """Whether a model's `generate` makes processors of suppressed tokens itself, as Whisper's does."""
    return hasattr(model, "_retrieve_logit_processors")
