"""Cuts drafts out of a target: some of its (decoder's) layers between its own embedding, last norm and head.

Drafts of an encoder-decoder read the target's encoding, as in Distil-Whisper (Gandhi et al. 2023, arXiv 2311.00430).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.bench.aligning.batches import IGNORED, in_bfloat16, model_inputs
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.models.names import is_gguf
from hf_specdec.bench.settings import BenchError
from hf_specdec.models.cache_rollback import has_recurrent_layers
from hf_specdec.models.trimmed_head import as_ranges


def check_target(pair: LoadedPair) -> None:
    """Raise `BenchError` if no draft can be cut out of a target."""
    name, config = pair.target_name, pair.target.config
    refusal = None
    if config.get_text_config(decoder=True) is not config and not pair.encoder_decoder:
        refusal = "reads more than text"
    elif getattr(config, "quantization_config", None) is not None and not is_gguf(name):  # GGUF weights are widened
        refusal = "has quantized weights, which can't be trained"
    elif has_recurrent_layers(pair.target):
        refusal = "has recurrent layers"
    elif len(_lists_of_layers(pair.target)) != 1:
        refusal = f"({type(pair.target).__name__}) does not keep all of its layers in one list"
    elif type(pair.target.get_output_embeddings()) is not torch.nn.Linear:
        refusal = "has no ordinary linear output head"
    if refusal:
        raise BenchError(
            f"--model_name: {name!r} {refusal}; drafts are made for models that read text, and for Whisper. Give "
            "another target, or fine-tune a draft that you have with --task align"
        )


@torch.no_grad()
def layer_changes(model: PreTrainedModel, batch: dict[str, Tensor]) -> list[float]:
    """How much each layer except the last turns the hidden states of the answers' tokens: angular distance, 0 to 1.

    The measure of Gromov et al. 2024 (arXiv 2403.17887). The last layer's output is only available after the norm.
    """
    with in_bfloat16(model):
        output = model.base_model(**model_inputs(model, batch), output_hidden_states=True, use_cache=False)
    states = output.decoder_hidden_states if model.config.is_encoder_decoder else output.hidden_states
    answers = batch["labels"] != IGNORED
    kept = [one[answers].float() for one in states[:-1]]
    cosines = [torch.cosine_similarity(before, after, dim=-1) for before, after in pairwise(kept)]
    return [float((one.clamp(-1, 1).acos() / torch.pi).mean()) for one in cosines]


def layers_that_change_most(changes: Sequence[float], count: int) -> tuple[int, ...]:
    """`count` layers: the first, the last, and those between them that change their input most.

    Args:
        changes: the changes by all layers except the last.
    """
    last = len(changes)
    between = sorted(range(1, last), key=lambda layer: -changes[layer])
    return tuple(sorted({0, last, *between[: max(0, count - 2)]}))


def cut_draft(target: PreTrainedModel, layers: Sequence[int], tokens: Sequence[int]) -> PreTrainedModel:
    """A model with some of a target's layers and copies of its other weights; `config.draft_tokens` are `tokens`.

    For an encoder-decoder, the layers are the decoder's, and `config.draft_shares_encoder` is true.

    Raises:
        BenchError: the target has no such layer, or layer 0 is missing but needed.
    """
    name, setting = _lists_of_layers(target)[0], _number_of_layers(target)
    count = int(getattr(target.config, setting))
    if beyond := [layer for layer in layers if layer >= count]:
        raise BenchError(f"--layers: {beyond[0]} is none of the target's layers 0 to {count - 1}")
    config = deepcopy(target.config)
    for key, value in vars(target.config).items():
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, key, [value[layer] for layer in layers])
    setattr(config, setting, len(layers))
    config.draft_tokens = as_ranges(tokens)
    if config.is_encoder_decoder:
        config.draft_shares_encoder = True
    config.name_or_path = ""
    vars(config).pop("quantization_config", None)  # of a GGUF file: its weights are widened
    draft: PreTrainedModel = type(target)(config).to(target.dtype)
    if target.get_output_embeddings().weight is not target.get_input_embeddings().weight:
        draft.set_output_embeddings(deepcopy(target.get_output_embeddings()))  # T5's configuration can't say so
    places = {layer: place for place, layer in enumerate(layers)}
    weights: dict[str, Any] = {}
    for key, tensor in target.state_dict().items():
        found = re.fullmatch(rf"{re.escape(name)}\.(\d+)\.(.*)", key)
        if found is None:
            weights[key] = tensor
        elif int(found[1]) in places:
            weights[f"{name}.{places[int(found[1])]}.{found[2]}"] = tensor
    if missing := draft.load_state_dict(weights, strict=False).missing_keys:
        raise BenchError(f"--layers: the first of them has to be 0, which holds what all layers read ({missing[0]})")
    draft.generation_config = deepcopy(target.generation_config)
    return draft.to(target.device).eval()


def _number_of_layers(model: PreTrainedModel) -> str:
    """The name of the configuration's number of (decoder) layers."""
    own = ("num_decoder_layers", "decoder_layers") if model.config.is_encoder_decoder else ()
    return next((name for name in own if hasattr(model.config, name)), "num_hidden_layers")


def _lists_of_layers(model: PreTrainedModel) -> list[str]:
    """The names of module lists that are as long as the number of (decoder) layers."""
    count = getattr(model.config, _number_of_layers(model), None)
    inner = set((model.get_decoder() if model.config.is_encoder_decoder else model).modules())
    named = ((name, one) for name, one in model.named_modules() if one in inner)
    return [name for name, one in named if isinstance(one, torch.nn.ModuleList) and len(one) == count]
