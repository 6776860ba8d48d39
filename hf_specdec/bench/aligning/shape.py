"""Drafts cut out of a target: some of its layers between its own embedding, last norm and head."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.bench.aligning.batches import IGNORED, in_bfloat16
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.settings import BenchError


def check_target(pair: LoadedPair) -> None:
    """Raises `BenchError` for a target that no draft can be cut out of."""
    name, config = pair.target_name, pair.target.config
    refusal = None
    if pair.encoder_decoder:
        refusal = "is an encoder-decoder model"
    elif config.get_text_config() is not config:
        refusal = "reads more than text"
    elif getattr(config, "quantization_config", None) is not None:
        refusal = "has quantized weights, which can't be trained"
    elif len(_lists_of_layers(pair.target)) != 1:
        refusal = f"({type(pair.target).__name__}) does not keep all of its layers in one list"
    elif type(pair.target.get_output_embeddings()) is not torch.nn.Linear:
        refusal = "has no ordinary linear output head"
    if refusal:
        raise BenchError(
            f"--model_name: {name!r} {refusal}; drafts are made for decoder-only models that read text. Give another "
            "target, or fine-tune a draft that you have with --task align"
        )


@torch.no_grad()
def layer_changes(model: PreTrainedModel, batch: dict[str, Tensor]) -> list[float]:
    """How much each layer but the last turns the states of the answers' tokens: angular distance, 0 to 1.

    The measure of Gromov et al. 2024 (arXiv 2403.17887). Of the last layer there are no states before the norm.
    """
    with in_bfloat16(model):
        states = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True,
            use_cache=False, logits_to_keep=1,
        ).hidden_states  # fmt: skip
    answers = batch["labels"] != IGNORED
    kept = [one[answers].float() for one in states[:-1]]
    cosines = [torch.cosine_similarity(before, after, dim=-1) for before, after in pairwise(kept)]
    return [float((one.clamp(-1, 1).acos() / torch.pi).mean()) for one in cosines]


def layers_that_change_most(changes: Sequence[float], count: int) -> tuple[int, ...]:
    """`count` layers: the first, the last, and between them those that change their input most.

    Args:
        changes: of all layers but the last.
    """
    last = len(changes)
    between = sorted(range(1, last), key=lambda layer: -changes[layer])
    return tuple(sorted({0, last, *between[: max(0, count - 2)]}))


def cut_draft(target: PreTrainedModel, layers: Sequence[int], tokens: Sequence[int]) -> PreTrainedModel:
    """A model of some of a target's layers with copies of all its other weights; `config.draft_tokens` are `tokens`.

    Raises:
        BenchError: the target has no such layer.
    """
    name = _lists_of_layers(target)[0]
    count = int(target.config.num_hidden_layers)
    if beyond := [layer for layer in layers if layer >= count]:
        raise BenchError(f"--layers: {beyond[0]} is none of the target's layers 0 to {count - 1}")
    config = deepcopy(target.config)
    for key, value in vars(target.config).items():
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, key, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)
    config.draft_tokens = sorted(tokens)
    config.name_or_path = ""
    draft: PreTrainedModel = type(target)(config).to(target.dtype)
    places = {layer: place for place, layer in enumerate(layers)}
    weights: dict[str, Any] = {}
    for key, tensor in target.state_dict().items():
        found = re.fullmatch(rf"{re.escape(name)}\.(\d+)\.(.*)", key)
        if found is None:
            weights[key] = tensor
        elif int(found[1]) in places:
            weights[f"{name}.{places[int(found[1])]}.{found[2]}"] = tensor
    draft.load_state_dict(weights)
    draft.generation_config = deepcopy(target.generation_config)
    return draft.to(target.device).eval()


def _lists_of_layers(model: PreTrainedModel) -> list[str]:
    """The names of the lists of as many modules as the model has layers."""
    count = getattr(model.config, "num_hidden_layers", None)
    named = model.named_modules()
    return [name for name, one in named if isinstance(one, torch.nn.ModuleList) and len(one) == count]
