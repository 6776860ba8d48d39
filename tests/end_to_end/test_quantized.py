"""Quantized weights: greedy speculation gives the tokens that the same model gives without it."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.families import pair, prompts
from optimum.quanto import freeze, qint8, quantize

import hf_specdec


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("quantized", ["target", "draft"])
def test_eight_bit_weights(quantized: str, batch_size: int) -> None:
    target, draft = pair("llama", dtype=torch.float32)
    full = copy.deepcopy(target)
    part = target if quantized == "target" else draft
    quantize(part, weights=qint8)
    freeze(part)
    inputs, settings = prompts(batch_size), {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    plain = target.generate(**inputs, **settings)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        out = target.generate(**inputs, **settings, num_assistant_tokens=4, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert 0 < out.speculation.acceptance_rate < 1
    logits = [model(**inputs).logits for model in (target, full)]
    assert torch.equal(*logits) is (quantized == "draft"), "the weights are those of eight bits"
