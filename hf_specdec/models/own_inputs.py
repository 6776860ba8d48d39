"""Checks models that prepare their own inputs: a pass must read exactly the tokens that it appends."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from hf_specdec.models.cache_names import cache_argument, cache_of
from hf_specdec.models.dynamic_runner import extend_mask, prompt_positions
from hf_specdec.models.traits import has_default_inputs, text_prefix


def takes_inputs_as_given(model: PreTrainedModel) -> bool:
    """Whether a pass's tokens, positions and masks may be passed to the model without preparing them first.

    They may if it uses transformers' default implementation, or, with an encoder, one that only adds missing positions.
    """
    if has_default_inputs(model) or not model.config.is_encoder_decoder:
        return has_default_inputs(model)
    ones = torch.ones(2, 2, dtype=torch.long)
    given = {"decoder_attention_mask": ones, "decoder_position_ids": ones - 1, "encoder_outputs": (), "use_cache": True}
    own = model.prepare_inputs_for_generation(ones, is_first_iteration=False, **given)
    default = GenerationMixin.prepare_inputs_for_generation(model, ones, is_first_iteration=False, **given)
    same = (
        torch.equal(own[key], value) if isinstance(value, Tensor) else own[key] is value
        for key, value in default.items()
    )
    return own.keys() == default.keys() and all(same)


def own_inputs(
    model: PreTrainedModel, model_kwargs: dict[str, Any], input_ids: Tensor, argument: str
) -> Mapping[str, Any] | None:
    """The inputs that a model prepares for a pass over the last token of its prompts.

    Args:
        model: the target or the draft.
        model_kwargs: the arguments that `generate` prepared for it.
        input_ids: `[B, P]`, the prompts.
        argument: the argument that passed the model, for the message.

    Returns:
        The arguments of its `forward`; None if it uses transformers' default implementation.

    Raises:
        ValueError: they hold other tokens than those to read: a mask token that the model appends (XLM, XLNet), or
            the whole text in spite of a cache (CPM-Ant).
    """
    if has_default_inputs(model):
        return None
    prefix = text_prefix(model)
    given = {key: value for key, value in model_kwargs.items() if key != "logits_to_keep"}
    position_key = f"{prefix}position_ids"
    if given.get(position_key) is None and position_key in inspect.signature(model.forward).parameters:
        mask = extend_mask(given.get(f"{prefix}attention_mask"), input_ids.shape[1])
        given[position_key] = prompt_positions(mask, input_ids.shape[1], input_ids.device)
    prepared = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, is_first_iteration=False, **given)
    tokens, key = prepared.get(f"{prefix}input_ids"), cache_argument(model)
    expected = [input_ids[:, -1:]]
    if (
        cache_of(model_kwargs) is None
        or prepared.get(key) is None
        or key not in inspect.signature(model.forward).parameters
    ):
        expected = [input_ids, input_ids[:, -1:]]
    if tokens is None or not any(torch.equal(tokens, wanted) for wanted in expected):
        made = "none" if tokens is None else f"tokens of the shape {list(tokens.shape)}"
        raise ValueError(
            f"{argument}={type(model).__name__} makes its own inputs: to read tokens of the shape "
            f"{list(expected[0].shape)}, it prepares {made}, so that its passes can't verify drafts: decode without "
            "speculation."
        )
    return dict(prepared)
