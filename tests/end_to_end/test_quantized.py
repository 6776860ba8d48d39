"""Quantized weights: greedy speculation gives the tokens that the same model gives without it."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.families import pair, prompts
from helpers.identity import same_as_plain
from helpers.pairwise import pairwise
from optimum.quanto import freeze, qint4, qint8, qtype, quantize

from hf_specdec.bench.models.precision import unpack_without_compiler


@pytest.mark.parametrize(
    ("weights", "quantized", "batch_size"), pairwise((qint8, qint4), ("target", "draft", "both"), (1, 4))
)
def test_weights_of_eight_and_four_bits(weights: qtype, quantized: str, batch_size: int) -> None:
    unpack_without_compiler()
    target, draft = pair("llama", noise=0.05, dtype=torch.float32)
    full = copy.deepcopy(target)
    for name, model in {"target": target, "draft": draft}.items():
        if quantized in (name, "both"):
            quantize(model, weights=weights)
            freeze(model)
    inputs, settings = prompts(batch_size), {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    out = same_as_plain(target, draft, inputs, settings)
    assert 0 < out.speculation.acceptance_rate < 1
    logits = [model(**inputs).logits for model in (target, full)]
    assert torch.equal(*logits) is (quantized == "draft"), "the weights are those of fewer bits"
