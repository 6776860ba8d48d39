"""What is refused before the first decoder pass: each by the argument, its value and the way out."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch.nn import Module
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from hf_specdec.host.processors import check_stateless
from hf_specdec.models.cache_rollback import cache_of, check_recurrence, check_rewindable, is_static_by_request

# Arguments that by themselves choose how transformers decodes.
OTHER_MODES = {
    "assistant_early_exit": "drafts by the target's own first layers",
    "constraints": "constrained beam search",
    "dola_layers": "DoLa",
    "force_words_ids": "constrained beam search",
    "prompt_lookup_num_tokens": "transformers' prompt lookup (ours is drafter='lookup')",
    "use_mtp": "transformers' multi-token prediction",
}


def check_call(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    processors: LogitsProcessorList,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuse what speculation can't do with a target.

    Raises:
        ValueError: names the argument, its value and the way out.
    """
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={generation_config.num_beams}: speculation decodes one sequence per row, so set num_beams=1, "
            "or decode without speculation for beam search."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None):
            raise ValueError(
                f"{name}=True: a round's passes cover several tokens and drop some, so there is no such output per "
                f"token; leave {name} out, or decode without speculation."
            )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds: a draft can't read another model's embeddings, so pass input_ids instead.")
    _check_mode(generation_config)
    check_stateless(processors, generation_config)
    check_model(model, "model")
    check_cache_implementation(model, generation_config.cache_implementation)
    cache, implementation = cache_of(model_kwargs), generation_config.cache_implementation
    if model_kwargs.get("use_cache") and not is_static_by_request(cache):
        if implementation is not None:
            argument = f"cache_implementation={implementation!r}"
        elif getattr(cache, "_is_user_defined", False):
            argument = f"past_key_values={type(cache).__name__}"
        else:
            argument = f"model={type(model).__name__}"
        check_rewindable(cache, argument)


def _check_mode(generation_config: GenerationConfig) -> None:
    """Refuse arguments that choose another way of decoding, which speculation would drop without a word.

    Raises:
        ValueError: names the argument, its value and the way out.
    """
    chosen = {name: getattr(generation_config, name, None) for name in OTHER_MODES}
    # Contrastive search, by the conditions of `GenerationConfig.get_generation_mode`.
    if not generation_config.do_sample and (generation_config.top_k or 0) > 1:
        chosen["penalty_alpha"] = getattr(generation_config, "penalty_alpha", None) or None
    for name, value in chosen.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name}={value!r}: it asks for {OTHER_MODES.get(name, 'contrastive search')}, which speculation is "
                f"not: leave {name} out, or decode without speculation."
            )


def check_cache_implementation(model: PreTrainedModel, name: str | None) -> None:
    """Refuse kinds of cache before `generate` makes them: some can't be made, one runs another loop than ours.

    Raises:
        ValueError: names the argument, its value and the way out.
    """
    reasons = {
        "paged": "it runs transformers' continuous batching, which speculation is not",
        "quantized": "what it has quantized can't be rolled back after a rejected draft",
    }
    if name is not None and "offloaded" in name and model.device.type == "cpu":
        reasons[name] = "it moves the cache off an accelerator, and the model is on the CPU"
    if name in reasons:
        raise ValueError(
            f"cache_implementation={name!r}: {reasons[name]}: use cache_implementation='dynamic' (the default), or "
            "decode without speculation."
        )


def check_is_model(draft: Any) -> None:
    """Refuse a draft that is no loaded model with a language-modelling head.

    Raises:
        ValueError: names the argument, its value and the way out.
    """
    # Adapters (PEFT) wrap a model of transformers without being one.
    if isinstance(draft, Module) and hasattr(draft, "config") and getattr(draft, "can_generate", lambda: False)():
        return
    value = type(draft).__name__ if isinstance(draft, Module) else repr(draft)
    raise ValueError(
        f"assistant_model={value} is no model that generates text: pass a loaded one, for instance "
        "AutoModelForCausalLM.from_pretrained(name)."
    )


def check_kinds(model: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Refuse an encoder-decoder draft of a decoder-only target, and the reverse.

    A decoder-only draft that reads the target's encoding (Distil-Whisper's) is no such.

    Raises:
        ValueError: names the argument, its value and the way out.
    """
    encoded, own_encoder = model.config.is_encoder_decoder, draft.config.is_encoder_decoder
    reads_encoding = "encoder_outputs" in inspect.signature(draft.forward).parameters
    if encoded == own_encoder or (encoded and reads_encoding):
        return
    kinds = {True: "an encoder-decoder model", False: "a decoder-only model"}
    raise ValueError(
        f"assistant_model={type(draft).__name__} is {kinds[bool(own_encoder)]} and the target {type(model).__name__} "
        f"{kinds[bool(encoded)]}: give a draft of the target's kind."
    )


def check_model(model: PreTrainedModel, argument: str) -> None:
    """Refuse models without weights at hand, and models with a state that can't be taken back.

    Args:
        model: the model.
        argument: the argument that it came by.

    Raises:
        ValueError: names the argument, its value and the way out.
    """
    named = f"{argument}={type(model).__name__}"
    if model.device.type == "meta":
        raise ValueError(
            f"{named} is on the 'meta' device, where there is nothing to compute with: load its weights, or give it "
            "a device_map that keeps its first layer on a real device."
        )
    sharding = _sharding_of(model)
    if sharding is not None:
        raise ValueError(
            f"{named} is sharded by {sharding}: every process has to make the same passes, but each accepts other "
            "drafts; gather the model's weights first, or decode without speculation."
        )
    check_recurrence(model, argument)


def check_synced_gpus(synced_gpus: bool | None) -> None:
    """Refuse `synced_gpus=True`.

    Raises:
        ValueError: names the argument, its value and the way out.
    """
    if synced_gpus:
        raise ValueError(
            "synced_gpus=True: every process would have to make the same passes, but each accepts other drafts; leave "
            "synced_gpus out, or decode without speculation."
        )


def _sharding_of(model: PreTrainedModel) -> str | None:
    """What splits a model's weights among processes that have to make the same passes; None if nothing does."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return None
    if is_deepspeed_zero3_enabled():
        return "DeepSpeed ZeRO-3"
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # not imported: no model is sharded by it
    kinds = tuple(getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    if is_fsdp_managed_module(model) or (kinds and any(isinstance(module, kinds) for module in model.modules())):
        return "FSDP"
    return None
