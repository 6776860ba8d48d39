"""Speculative decoding beside plain `generate`: the same tokens."""

from typing import Any

import torch
from transformers import PreTrainedModel

import hf_specdec


def speculated(target: PreTrainedModel, draft: Any, /, *args: Any, **call: Any) -> Any:
    """What a speculative call of `generate` returns; without a draft model it drafts as it is told."""
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        return target.generate(*args, **call)


def same_as_plain(
    target: PreTrainedModel,
    draft: Any,
    inputs: dict[str, Any],
    call: dict[str, Any],
    plain: torch.Tensor | None = None,
    **settings: Any,
) -> Any:
    """The output of a speculative call, whose tokens are those of plain `generate`.

    Args:
        call: arguments of both calls.
        plain: the tokens of plain `generate`, where they are known.
        settings: those of the speculative call alone.
    """
    if plain is None:
        plain = target.generate(**inputs, **{**call, "return_dict_in_generate": True}).sequences
    settings = {"return_dict_in_generate": True, "assistant_model": draft, **settings}
    out = speculated(target, None, **inputs, **{**call, **settings})
    assert torch.equal(out.sequences, plain), settings
    return out
