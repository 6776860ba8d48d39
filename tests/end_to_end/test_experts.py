"""Mixtures of experts: greedy speculation gives plain `generate`'s tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.families import prompts
from helpers.recurrent_families import ATTENTION, COMMON, noisy
from torch import Tensor
from transformers import PreTrainedModel

import hf_specdec

DECODER = {**COMMON, **ATTENTION, "num_hidden_layers": 2, "max_position_embeddings": 128, "head_dim": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
}


def mixture(family: str, **overrides: Any) -> PreTrainedModel:
    """A seeded mixture of experts in float64, which only its eager experts compute in."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**DECODER, **SETTINGS[family], **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "embed" in name else 0.3)
    model.set_experts_implementation("eager")
    return model.to(torch.float64)


# As published: the row of docs/families.md, the family, its experts, and how many a token takes.
PUBLISHED = (
    ("Mixtral-8x7B", "Mixtral", 8, 2),
    ("Qwen3-30B-A3B", "Qwen3Moe", 128, 8),
    ("OLMoE-1B-7B", "Olmoe", 64, 8),
    ("gpt-oss-20b", "GptOss", 32, 4),
)
VERIFIED = 5


def touched(experts: int, each: int, tokens: int) -> float:
    """Expected number of experts that `tokens` tokens take if each of them draws its own at random."""
    return experts * (1 - (1 - each / experts) ** tokens)


def counted(target: PreTrainedModel) -> dict[int, float]:
    """The mean number of experts of a layer that a pass takes, by its width, over single and verifying passes."""
    seen: dict[int, list[int]] = {1: [], VERIFIED: []}

    def count(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if len(chosen := output[-1]) in seen:
            seen[len(chosen)].append(len(chosen.unique()))

    routers = [part for part in target.modules() if type(part).__name__.endswith("Router")]
    hooks = [router.register_forward_hook(count) for router in routers]
    settings = {"max_new_tokens": 40, "do_sample": True, "eos_token_id": None}
    torch.manual_seed(0)
    target.generate(**prompts(1), **settings)
    with hf_specdec.enable(target, assistant_model=noisy(target), generation_strategy="speculative"):
        target.generate(**prompts(1), **settings, num_assistant_tokens=VERIFIED - 1)
    for hook in hooks:
        hook.remove()
    return {width: sum(counts) / len(counts) for width, counts in seen.items()}


@pytest.mark.parametrize(("name", "family", "experts", "each"), PUBLISHED)
def test_the_table_of_experts_in_the_documentation(name: str, family: str, experts: int, each: int) -> None:
    """Tokens of one text choose alike, and so take fewer experts than independent draws would, but not far fewer."""
    numbers = {
        "Mixtral": {"num_local_experts": experts, "num_experts_per_tok": each},
        "GptOss": {"num_local_experts": experts, "num_experts_per_tok": each},
    }
    more = numbers.get(family, {"num_experts": experts, "num_experts_per_tok": each})
    found, expected = counted(mixture(family, **more)), touched(experts, each, VERIFIED)
    assert found[1] == each
    assert touched(experts, each, VERIFIED - 2) < found[VERIFIED] < expected < touched(experts, each, VERIFIED + 2)
    row = f"| {name} | {experts} | {each} | {expected:.0f} | {expected / each:.1f} |"
    assert row in (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")


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
