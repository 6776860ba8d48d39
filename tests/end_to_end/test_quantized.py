"""Quantized weights: greedy speculation gives the tokens that the same model gives without it."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.families import pair, prompts
from optimum.quanto import freeze, qint4, qint8, qtype, quantize

import hf_specdec
from hf_specdec.bench.models.precision import unpack_without_compiler


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("quantized", ["target", "draft", "both"])
@pytest.mark.parametrize("weights", [qint8, qint4], ids=str)
def test_weights_of_eight_and_four_bits(weights: qtype, quantized: str, batch_size: int) -> None:
    unpack_without_compiler()
    target, draft = pair("llama", noise=0.05, dtype=torch.float32)
    full = copy.deepcopy(target)
    for name, model in {"target": target, "draft": draft}.items():
        if quantized in (name, "both"):
            quantize(model, weights=weights)
            freeze(model)
    inputs, settings = prompts(batch_size), {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    plain = target.generate(**inputs, **settings)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        out = target.generate(**inputs, **settings, num_assistant_tokens=4, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert 0 < out.speculation.acceptance_rate < 1
    logits = [model(**inputs).logits for model in (target, full)]
    assert torch.equal(*logits) is (quantized == "draft"), "the weights are those of fewer bits"
