"""Where two outputs for the same prompt first differ, and how close the model's choice was there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.bench.records import Divergence


def first_divergence(tokens: Sequence[int], reference_tokens: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None; an output that ends earlier differs at its end."""
    for i, (token, reference) in enumerate(zip(tokens, reference_tokens, strict=False)):
        if token != reference:
            return i
    shorter, longer = sorted((len(tokens), len(reference_tokens)))
    return None if shorter == longer else shorter


def divergence(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], tokens: Sequence[int], reference_tokens: Sequence[int]
) -> Divergence | None:
    """Find the first divergence of two outputs and the model's logits there, with one pass; None if they are equal.

    Args:
        model: the target.
        inputs: the inputs of `generate` for one row: `input_ids` `[1, P]`, and `attention_mask` if padded, or
            `input_features` of a recording.
        tokens, reference_tokens: new tokens only, without the prompt.
    """
    position = first_divergence(tokens, reference_tokens)
    if position is None:
        return None
    logits = next_logits(model, inputs, reference_tokens[:position])
    top = logits.topk(2).values
    gap = None
    if position < min(len(tokens), len(reference_tokens)):
        gap = float((logits[tokens[position]] - logits[reference_tokens[position]]).abs())
    return Divergence(position, float(top[0] - top[1]), gap)


@torch.no_grad()
def next_logits(model: PreTrainedModel, inputs: Mapping[str, Tensor], new_tokens: Sequence[int]) -> Tensor:
    """Float32 logits `[V]` for the token after `new_tokens`, from one pass, before any processor.

    Left padding is removed first, so that positions need not be passed; an encoder keeps its padding.

    Args:
        inputs: as in `divergence`.

    Raises:
        ValueError: more than one row.
    """
    if "input_features" in inputs:  # its decoder starts with tokens that only `generate` chooses
        most, once = len(new_tokens) + 1, {"force_unique_generate_call": True, "return_dict_in_generate": True}
        output = model.generate(**inputs, **once, max_new_tokens=most, do_sample=False, output_logits=True)
        return output.logits[-1][0].float()
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if len(ids) != 1:
        raise ValueError(f"input_ids: {len(ids)} rows; give the one row whose output diverged, input_ids[i : i + 1].")
    new = ids.new_tensor([list(new_tokens)])
    passed: dict[str, Any]
    if model.config.is_encoder_decoder:
        starts = model.generation_config.decoder_start_token_id
        start = model.config.decoder_start_token_id if starts is None else starts
        passed = {"input_ids": ids, "decoder_input_ids": torch.cat([new.new_full((1, 1), start), new], dim=1)}
        passed |= {} if mask is None else {"attention_mask": mask}
    else:
        ids = ids if mask is None else ids[:, mask[0].bool()]
        passed = {"input_ids": torch.cat([ids, new], dim=1)}
    return model(**passed, use_cache=False, return_dict=True).logits[0, -1].float()
