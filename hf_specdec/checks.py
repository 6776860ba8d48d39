"""Checks before the first decoder pass.

They raise a `ValueError` that names the argument and its value, and says what to do instead.
"""

from __future__ import annotations

import inspect
import sys
from itertools import chain
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import Module
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from hf_specdec.compat.accelerate_private import has_hook
from hf_specdec.compat.transformers_private import is_callers_cache, own_loop, steered_by
from hf_specdec.config import SpeculationConfig
from hf_specdec.host.caller import warn_caller
from hf_specdec.host.processors import check_processors
from hf_specdec.models.cache_names import cache_argument, cache_of
from hf_specdec.models.cache_rollback import check_recurrence, check_rewindable, is_static_by_request
from hf_specdec.models.decoder_states import STATES
from hf_specdec.models.eagle_draft import Eagle3Draft
from hf_specdec.models.traits import drafts_blocks, embedded, generating_parts, wrapped_model

# Arguments that select another decoding mode of transformers, which each description names.
OTHER_MODES = {
    "assistant_early_exit": "drafts by the target's own first layers",
    "constraints": "constrained beam search",
    "dola_layers": "DoLa",
    "force_words_ids": "constrained beam search",
    "max_matching_ngram_size": "the n-grams of transformers' prompt lookup (drafter='suffix' finds the longest match)",
    "prompt_lookup_num_tokens": "transformers' prompt lookup (ours is drafter='suffix')",
    "speculation_type": "transformers' block drafts (ours are drafter='dflash')",
    "use_mtp": "transformers' multi-token prediction (ours is drafter='mtp')",
}

# The versions that setup.py requires: from the first up to, but not including, the second.
VERSIONS: dict[Any, tuple[str, str | None]] = {torch: ("2.6", None), transformers: ("5.17", "6")}


def check_versions() -> None:
    """Refuse versions of torch and transformers outside `VERSIONS`.

    Raises:
        ImportError: names the installed version, and the command that installs another.
    """
    for package, (first, end) in VERSIONS.items():
        # A development version counts as the release that it precedes.
        found = Version(package.__version__).release
        if found < Version(first).release or (end is not None and found >= Version(end).release):
            wanted = f"{package.__name__}>={first}" + (f",<{end}" if end else "")
            raise ImportError(
                f"{package.__name__} {package.__version__} is installed, but hf_specdec needs {wanted}: "
                f"pip install '{wanted}'"
            )


def check_call(
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    processors: LogitsProcessorList,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuse arguments of `generate` and models that speculation does not support."""
    if not len(input_ids):
        raise ValueError(
            f"input_ids has the shape {list(input_ids.shape)}: there is no row to decode; pass at least one."
        )
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={generation_config.num_beams}: speculation decodes one sequence per row, so set num_beams=1, "
            "or decode without speculation for beam search."
        )
    _check_states(model, generation_config, model_kwargs)
    _check_embeddings(model, input_ids, model_kwargs)
    _check_sizes(generation_config, model_kwargs)
    _check_mode(generation_config)
    check_processors(processors)
    check_model(model, "model")
    check_cache_implementation(model, generation_config.cache_implementation)
    cache, implementation = cache_of(model_kwargs), generation_config.cache_implementation
    if model_kwargs.get("use_cache") and not is_static_by_request(cache):
        if implementation is not None:
            argument = f"cache_implementation={implementation!r}"
        elif is_callers_cache(cache):
            argument = f"{cache_argument(model)}={type(cache).__name__}"
        else:
            argument = f"model={type(model).__name__}"
        check_rewindable(cache, argument)


def _check_states(model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse `output_attentions` and `output_hidden_states` of decoder-only models, and with a filled cache."""
    cache = cache_of(model_kwargs)
    for name in STATES if generation_config.return_dict_in_generate else ():
        if getattr(generation_config, name, None) and not model.config.is_encoder_decoder:
            raise ValueError(
                f"{name}=True: a round's passes cover several tokens and drop some, so there is no such output per "
                f"token; leave {name} out, or decode without speculation."
            )
        if getattr(generation_config, name, None) and cache is not None and cache.get_seq_length():
            raise ValueError(
                f"{name}=True with a filled {cache_argument(model)}={type(cache).__name__}: this output needs a pass "
                f"over the whole text, so leave one of them out, or decode without speculation."
            )


def _check_embeddings(model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse embeddings of a decoder's prompt without their tokens, or with a filled cache."""
    embeddings, cache = model_kwargs.get("inputs_embeds"), cache_of(model_kwargs)
    if embeddings is None or model.config.is_encoder_decoder:
        return
    if embeddings.shape[:2] != input_ids.shape:
        raise ValueError(
            f"inputs_embeds of the shape {list(embeddings.shape)} with input_ids of the shape {list(input_ids.shape)}: "
            "a draft reads tokens, so pass the input_ids as well, one per embedding, or decode without speculation."
        )
    if cache is not None and cache.get_seq_length():
        raise ValueError(
            f"inputs_embeds with a filled {cache_argument(model)}={type(cache).__name__}: pass input_ids instead, or "
            "leave the cache out."
        )


def _check_sizes(generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse invalid chunk sizes, and chunks of a prompt without a cache; warn if pictures rule out chunks."""
    size: Any = generation_config.prefill_chunk_size
    if size is None:
        return
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"prefill_chunk_size={size!r} must be an integer of at least 1, or None.")
    if cache_of(model_kwargs) is None:
        raise ValueError(
            f"prefill_chunk_size={size} without a cache: each chunk would be read again with the next, so leave it out "
            "or pass use_cache=True."
        )
    if embedded(model_kwargs):
        warn_caller(f"prefill_chunk_size={size}: a prompt with pictures, sound or embeddings is read in one pass.")


def _check_mode(generation_config: GenerationConfig) -> None:
    """Refuse arguments that select another decoding mode, which speculation would silently ignore."""
    chosen = {name: getattr(generation_config, name, None) for name in OTHER_MODES}
    # The conditions for contrastive search are those of `GenerationConfig.get_generation_mode`.
    if not generation_config.do_sample and (generation_config.top_k or 0) > 1:
        chosen["penalty_alpha"] = getattr(generation_config, "penalty_alpha", None) or None
    for name, value in chosen.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name}={value!r}: it selects {OTHER_MODES.get(name, 'contrastive search')}, which can't be combined "
                f"with speculation: leave {name} out, or decode without speculation."
            )


def check_cache_implementation(model: PreTrainedModel, name: str | None) -> None:
    """Refuse cache implementations that cannot be built or rolled back, or that select another decoding loop."""
    reasons = {
        "paged": "it selects transformers' continuous batching, which can't be combined with speculation",
        "quantized": "its quantized part can't be rolled back after a rejected draft",
    }
    if name is not None and "offloaded" in name and model.device.type == "cpu":
        reasons[name] = "it offloads the cache of an accelerator, but the model is on the CPU"
    if name in reasons:
        raise ValueError(
            f"cache_implementation={name!r}: {reasons[name]}: use cache_implementation='dynamic' (the default), or "
            "decode without speculation."
        )


def checked_target(model: Any) -> PreTrainedModel:
    """Unwrap `model` to the model whose `generate` is transformers' own.

    Raises:
        ValueError: `model` is a name or a class, or contains no such model or several, so that speculation would never
            or not reliably take place; names the argument and its value, and says what to do instead.
    """
    if not isinstance(model, Module):
        raise ValueError(
            f"model={model!r} is not a loaded model: pass one, or leave it out to enable speculation for all models."
        )
    found = generating_parts(model)
    if len(found) == 1:
        target: PreTrainedModel = found[0]
        return target
    target = wrapped_model(model)
    names = [f"model.{name}" for name, part in target.named_modules() if any(part is other for other in found)]
    way_out = f"pass the one that should speculate, of {', '.join(names)}" if names else "pass a model that does"
    runs = " that runs those of several models" if names else " that does not run transformers'"
    what = f"a generate{runs}" if hasattr(target, "generate") else "no generate"
    raise ValueError(
        f"model={type(target).__name__} has {what}: {way_out}, or leave it out to enable speculation for all models."
    )


def check_is_model(draft: Any) -> None:
    """Refuse a draft that is not a loaded model with a language-modelling head."""
    model = wrapped_model(draft)
    if isinstance(model, Eagle3Draft):
        return
    if isinstance(model, PreTrainedModel) and (model.can_generate() or drafts_blocks(model)):
        return
    value = type(draft).__name__ if isinstance(draft, Module) else repr(draft)
    raise ValueError(
        f"assistant_model={value} is not a model that generates text: pass a loaded one, for example "
        "AutoModelForCausalLM.from_pretrained(name)."
    )


def check_draft(draft: Any, config: SpeculationConfig) -> None:
    """Refuse a draft that the drafter cannot use, or a missing one that it needs."""
    if draft is not None:
        check_is_model(draft)
    in_blocks = config.drafter == "dflash"
    if (in_blocks or config.drafts_by_model) and in_blocks != (draft is not None and drafts_blocks(draft)):
        raise ValueError(
            f"assistant_model={None if draft is None else type(draft).__name__} with drafter={config.drafter!r}: "
            + (
                "this drafter is for DFlash drafts; pass one, or leave out drafter and speculation_type='dflash'."
                if in_blocks
                else "it is a DFlash draft, which needs drafter='dflash' or speculation_type='dflash'."
            )
        )
    if draft is None and config.drafts_by_model:
        raise ValueError(
            f"assistant_model=None with generation_strategy={config.strategy!r} and drafter={config.drafter!r}: "
            "pass the draft, assistant_model=draft, in the call or to hf_specdec.enable(model, "
            "assistant_model=draft), or choose drafter='suffix', which needs no model."
        )


def check_kinds(model: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Refuse an encoder-decoder draft for a decoder-only target, and the reverse.

    A decoder-only draft that reads the target's encoder output, such as Distil-Whisper's, is allowed.
    """
    encoded, own_encoder = model.config.is_encoder_decoder, draft.config.is_encoder_decoder
    reads_encoding = "encoder_outputs" in inspect.signature(draft.forward).parameters
    if encoded == own_encoder or (encoded and reads_encoding):
        return
    kinds = {True: "an encoder-decoder model", False: "a decoder-only model"}
    raise ValueError(
        f"assistant_model={type(draft).__name__} is {kinds[bool(own_encoder)]} and the target {type(model).__name__} "
        f"{kinds[bool(encoded)]}: choose a draft of the target's kind."
    )


def check_model(model: PreTrainedModel, argument: str) -> None:
    """Refuse models that are not loaded or are sharded, that have their own loop, or that cannot be rolled back.

    Args:
        model: the target or the draft.
        argument: the name of its argument, for the message.
    """
    named = f"{argument}={type(model).__name__}"
    empty = "" if model.device.type == "meta" else _empty_part(model)
    if empty is not None:
        raise ValueError(
            f"{named} is on the 'meta' device{empty and f' in its part {empty}'}, which holds no weights: load them, "
            "or give it a device_map that keeps its first layer on a real device."
        )
    if argument == "model" and (own := own_loop(model)) is not None:
        raise ValueError(
            f"{named} decodes in its own loop, {own}, which speculation would replace: decode without speculation."
        )
    sharding = _sharding_of(model)
    if sharding is not None:
        raise ValueError(
            f"{named} is sharded by {sharding}: all processes must run the same passes, but each accepts different "
            "drafts; gather the model's weights first, or decode without speculation."
        )
    check_recurrence(model, argument)
    if argument == "model" and (steered := steered_by(model)):
        raise ValueError(
            f"{named} controls its decoding after every token, by {', '.join(steered)}, which is not possible in a "
            "pass over several tokens: decode without speculation."
        )


_REFUSED_FLAGS = {
    "synced_gpus": (
        "all processes must run the same passes, but each accepts different drafts; leave synced_gpus out, or "
        "decode without speculation"
    ),
    "token_healing": (
        "transformers passes no tokenizer to custom loops; heal the prompt first, with input_ids = "
        "model.heal_tokens(input_ids, tokenizer), and leave token_healing out"
    ),
}


def check_flags(**flags: bool | None) -> None:
    """Refuse `synced_gpus=True` and `token_healing=True`."""
    for name, value in flags.items():
        if value:
            raise ValueError(f"{name}=True: {_REFUSED_FLAGS[name]}.")


def _empty_part(model: PreTrainedModel) -> str | None:
    """The name of a part on the device `meta` that accelerate does not load for its passes; None if there is none."""
    if not any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers())):
        return None
    # The hook of the whole model only moves its inputs; the hook of a part may load all that is in it.
    loaded = tuple(f"{name}." for name, module in model.named_modules() if name and has_hook(module))
    for name, module in model.named_modules():
        own = chain(module.parameters(recurse=False), module.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own) and not f"{name}.".startswith(loaded):
            return name
    return None


def _sharding_of(model: PreTrainedModel) -> str | None:
    """The name of the library that shards a model's weights over processes; None if unsharded."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return None
    if is_deepspeed_zero3_enabled():
        return "DeepSpeed ZeRO-3"
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # if not imported, no model is sharded with it
    kinds = tuple(getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    if is_fsdp_managed_module(model) or (kinds and any(isinstance(module, kinds) for module in model.modules())):
        return "FSDP"
    return None
