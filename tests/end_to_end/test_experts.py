"""Mixtures of experts: greedy speculation gives plain `generate`'s tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers.families import prompts
from helpers.recurrent_families import ATTENTION, COMMON, noisy
from transformers import PreTrainedModel

import hf_specdec

DECODER = {**COMMON, **ATTENTION, "num_hidden_layers": 2, "max_position_embeddings": 128, "head_dim": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
}


def mixture(family: str) -> PreTrainedModel:
    """A seeded mixture of experts in float64, which only its eager experts compute in."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**DECODER, **SETTINGS[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "embed" in name else 0.3)
    model.set_experts_implementation("eager")
    return model.to(torch.float64)


@pytest.mark.parametrize("family", SETTINGS)
def test_mixtures_of_experts(family: str) -> None:
    target = mixture(family)
    draft, rates = noisy(target), []
    for batch_size in (1, 4):
        inputs = prompts(batch_size)
        plain = target.generate(**inputs, max_new_tokens=16, do_sample=False)
        for strategy in ({}, {"generation_strategy": "bild", "rollback_threshold": 0.0}):
            settings = {"generation_strategy": "speculative", "num_assistant_tokens": 4, **strategy}
            with hf_specdec.enable(target, assistant_model=draft):
                out = target.generate(
                    **inputs, max_new_tokens=16, do_sample=False, return_dict_in_generate=True, **settings
                )
            assert torch.equal(out.sequences, plain), (batch_size, strategy)
            rates.append(out.speculation.acceptance_rate)
    assert any(rate is not None and 0 < rate < 1 for rate in rates)
