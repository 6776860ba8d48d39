"""Finds out whether a pass's tokens see later ones: then a drafted token would change the scores before it.

The attention of most models' decoders is marked as causal. Other models are tested once, with a few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.compat.transformers_private import attention_name
from hf_specdec.models.cache_names import CACHE_NAMES, cache_argument, cache_of
from hf_specdec.models.cache_rollback import has_recurrent_layers, new_cache
from hf_specdec.models.dynamic_runner import PER_TOKEN_KWARGS, DynamicRunner
from hf_specdec.models.expert_capacity import most_tokens
from hf_specdec.models.row_by_row_runner import row_of
from hf_specdec.models.traits import PLACEHOLDERS, embedded, keeps_pictures_apart, padding_without_position

TRIED_TOKENS = 8  # tokens of a text-only prompt to test with
NOISE = 1e-4  # share of the largest score that rounding may change
# The arguments of a text-only prompt, which can be cut.
TEXT_KWARGS = frozenset({*CACHE_NAMES, "use_cache", "attention_mask", "position_ids", "logits_to_keep"})


@dataclass(frozen=True)
class Sight:
    """Whether a token sees those after it in the same pass.

    Args:
        prompt: in the pass that reads the prompt.
        later: in later passes.
    """

    prompt: bool
    later: bool


# The results for tested models, by kind of attention and whether they have no cache.
_sights: WeakKeyDictionary[PreTrainedModel, dict[Hashable, Sight]] = WeakKeyDictionary()


def prompt_is_read_alone(
    model: PreTrainedModel, model_kwargs: dict[str, Any], input_ids: Tensor, argument: str
) -> bool:
    """Whether the prompt must be read in a pass without drafts.

    This is the case if the prompt has pictures or sound (a drafted placeholder would be taken for one), embeddings
    instead of tokens, token types (which let PaliGemma's prefix attend both ways), or padding while the model counts
    positions by a pass's tokens; and if the model's prompts attend both ways, if it keeps pictures apart (GIT masks
    padding in the prompt only), or if its experts have a limited capacity.

    Args:
        model: the target or the draft.
        model_kwargs: the arguments of its passes.
        input_ids: `[B, P]`, the prompts.
        argument: the argument that passed the model, for the message.

    Raises:
        ValueError: tokens see later ones in every pass, or the model reads only one token per pass.
    """
    typed = _has_types(model_kwargs)
    sight = _sight(model, model_kwargs, input_ids, argument, rereads_types=typed and cache_of(model_kwargs) is None)
    if sight.later:
        raise ValueError(
            f"{argument}={type(model).__name__}: in its passes tokens see later ones, so drafts would change the "
            "scores before them: load it as a decoder (is_decoder=True in its configuration), try "
            f"use_cache={cache_of(model_kwargs) is None}, or decode without speculation."
        )
    padding = padding_without_position(model)
    return (
        sight.prompt
        or typed
        or keeps_pictures_apart(model)
        or embedded(model_kwargs)
        or most_tokens(model) < math.inf
        or (padding is not None and bool((input_ids == padding).any()))
    )


def marked_causal(model: PreTrainedModel) -> bool:
    """Whether some attention of a model's decoder is marked as causal, and the configuration does not contradict it."""
    if not getattr(model.config.get_text_config(decoder=True), "is_causal", True):
        return False
    decoder = model.get_decoder() or model
    return any(getattr(module, "is_causal", None) is True for module in decoder.modules())


def _has_types(model_kwargs: Mapping[str, Any]) -> bool:
    """Whether the prompts' tokens have types; 0 in `mm_token_type_ids` is text."""
    types = {key: model_kwargs.get(key) for key in PER_TOKEN_KWARGS}
    return any(given is not None and (key == "token_type_ids" or bool(given.any())) for key, given in types.items())


def _sight(
    model: PreTrainedModel, model_kwargs: dict[str, Any], input_ids: Tensor, argument: str, *, rereads_types: bool
) -> Sight:
    """What a model's tokens see; `rereads_types`: every pass reads the whole text and its types."""
    if rereads_types:
        return _try(model, model_kwargs, input_ids, argument)
    if marked_causal(model) or has_recurrent_layers(model):
        return Sight(prompt=False, later=False)
    attention = attention_name(model.config.get_text_config(decoder=True))
    known, situation = _sights.setdefault(model, {}), (attention, cache_of(model_kwargs) is None)
    if situation not in known:
        untyped = {key: value for key, value in model_kwargs.items() if key not in PER_TOKEN_KWARGS}
        known[situation] = _try(model, untyped, input_ids, argument)
    return known[situation]


def _try(model: PreTrainedModel, model_kwargs: dict[str, Any], input_ids: Tensor, argument: str) -> Sight:
    """Read pairs of tokens with different second tokens, and check whether the first one's scores differ."""
    kwargs, ids = _tried_inputs(model, model_kwargs, input_ids)
    placeholders = {getattr(model.config, name, None) for name in PLACEHOLDERS}
    one, other = (ids.new_tensor([[n]]) for n in islice((n for n in count() if n not in placeholders), 2))

    def runner() -> DynamicRunner:
        given = dict(kwargs)
        if cache_of(model_kwargs) is not None:
            given[cache_argument(model)] = new_cache(model, argument, cross_attention="encoder_outputs" in given)
        return DynamicRunner(model, given, ids, ids.shape[1] + 2)

    tried = runner()
    scores = tried.forward(torch.cat([ids, one], dim=1), 2)
    prompt = _differ(scores, runner().forward(torch.cat([ids, other], dim=1), 2))
    later = []
    for second in (one, other):
        tried.rewind([ids.shape[1]])
        later.append(_two_tokens(tried, torch.cat([one, second], dim=1), f"{argument}={type(model).__name__}"))
    return Sight(prompt, _differ(*later))


def _two_tokens(runner: DynamicRunner, tokens: Tensor, named: str) -> Tensor:
    """The scores `[1, 2, V]` of a pass over two tokens after a prompt.

    Raises:
        ValueError: the model reads one token per pass, with or without its own error.
    """
    reason = "it returns the scores of one"
    try:
        scores = runner.forward(tokens, 2)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        if scores.shape[1] == 2:
            return scores
    raise ValueError(
        f"{named} can't read two tokens in a pass after its prompt ({reason}), which verifying drafts requires: "
        "decode without speculation."
    )


def _tried_inputs(
    model: PreTrainedModel, model_kwargs: dict[str, Any], input_ids: Tensor
) -> tuple[dict[str, Any], Tensor]:
    """The first row's arguments without its cache, and its prompt; of a text-only prompt only the last tokens."""
    given = {key: value for key, value in model_kwargs.items() if value is not None}
    if not model.config.is_encoder_decoder and TEXT_KWARGS.issuperset(given):
        return {"use_cache": given.get("use_cache")}, input_ids[:1, -TRIED_TOKENS:]
    kwargs = {key: row_of(value, 0, len(input_ids)) for key, value in given.items() if key not in CACHE_NAMES}
    mask = kwargs.get("attention_mask")
    if not model.config.is_encoder_decoder and mask is not None and mask.shape[1] > input_ids.shape[1]:
        # The given cache was filled, and is left out here.
        kwargs["attention_mask"] = mask[:, -input_ids.shape[1] :]
        kwargs.pop("position_ids", None)
    return kwargs, input_ids[:1]


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether the scores of the first of two tokens `[1, 2, V]` differ by more than rounding."""
    difference = (one[:, 0] - other[:, 0]).abs().max()
    return bool(difference > NOISE * one[:, 0].abs().max())
