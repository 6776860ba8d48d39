"""Speculative decoding beside plain `generate`: the same tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

import hf_specdec


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
        draft: None to draft without a model.
        call: arguments of both calls.
        plain: the tokens of plain `generate`, where they are known.
        settings: those of the speculative call alone.
    """
    if plain is None:
        plain = target.generate(**inputs, **{**call, "return_dict_in_generate": True}).sequences
    settings = {"return_dict_in_generate": True, "assistant_model": draft, **settings}
    with hf_specdec.enable(target, generation_strategy="speculative"):
        out = target.generate(**inputs, **{**call, **settings})
    assert torch.equal(out.sequences, plain), settings
    return out
