"""Mixtures of experts: greedy speculation gives plain `generate`'s tokens."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.families import prompts
from helpers.identity import same_as_plain, speculated
from helpers.patches import interpret_compiled_steps
from helpers.recurrent_families import ATTENTION, COMMON, noisy
from transformers import PreTrainedModel

from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.engine_store import kept_engines

DECODER = {**COMMON, **ATTENTION, "num_hidden_layers": 2, "max_position_embeddings": 128, "head_dim": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
}


def mixture(family: str) -> PreTrainedModel:
    """A seeded mixture of experts in float64, which only its eager experts compute in."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**DECODER, **SETTINGS[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "embed" in name else 0.3)
    model.set_experts_implementation("eager")
    return model.to(torch.float64)


# As published: the row of docs/families.md, its experts, and how many a token takes.
PUBLISHED = (("Mixtral-8x7B", 8, 2), ("Qwen3-30B-A3B", 128, 8), ("OLMoE-1B-7B", 64, 8), ("gpt-oss-20b", 32, 4))
VERIFIED = 5


def touched(experts: int, each: int, tokens: int) -> float:
    """Expected number of experts that `tokens` tokens take if each of them draws its own at random."""
    return experts * (1 - (1 - each / experts) ** tokens)


def test_the_table_of_experts_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    for name, experts, each in PUBLISHED:
        expected = touched(experts, each, VERIFIED)
        assert f"| {name} | {experts} | {each} | {expected:.0f} | {expected / each:.1f} |" in page


@pytest.mark.parametrize("family", SETTINGS)
def test_mixtures_of_experts(family: str) -> None:
    target, rates = mixture(family), []
    draft, call = noisy(target), {"max_new_tokens": 16, "do_sample": False}
    for rows, strategy in ((1, {}), (4, {}), (4, {"generation_strategy": "bild", "rollback_threshold": 0.0})):
        out = same_as_plain(target, draft, prompts(rows), call, **strategy)
        rates.append(out.speculation.acceptance_rate)
    assert any(rate is not None and 0 < rate < 1 for rate in rates)


ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "no cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "captured": {"cache_implementation": "static"},
    "compiled": {"compile": True},
}
PREPARED = ("captured", "compiled")


# Every engine with a family, and every family with the three that differ most.
ROUTED = [("Qwen2Moe", engine, 3) for engine in ENGINES] + [
    (family, engine, 1) for family in SETTINGS for engine in ("default", "captured", "compiled")
]


@pytest.mark.parametrize(("family", "engine", "rows"), ROUTED)
def test_router_logits_that_a_configuration_asks_for_are_not_computed(
    family: str, engine: str, rows: int, monkeypatch
) -> None:
    """Plain `generate` computes them, and a loss that takes the mask for padding, and drops both."""
    target, call = mixture(family), {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    draft = noisy(target)
    if engine == "captured":
        monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    elif engine == "compiled":
        interpret_compiled_steps(monkeypatch)
        for model in (target.float(), draft.float()):  # eager experts read values
            model.set_experts_implementation("batched_mm")
    plain = target.generate(**prompts(rows), **call)
    for model in (target, draft):
        model.config.output_router_logits = model.config.output_hidden_states = True
    if rows == 1:
        assert torch.equal(target.generate(**prompts(rows), **call, output_hidden_states=False), plain)
    seen: list[Any] = []
    monkeypatch.setattr(
        sys.modules[type(target).__module__], "load_balancing_loss_func", lambda *_: seen.append("loss")
    )
    if engine not in PREPARED:  # they leave models with hooks alone
        for model in (target, draft):
            model.register_forward_hook(lambda *args: seen.extend((args[-1].router_logits, args[-1].hidden_states)))
    settings = {"num_assistant_tokens": 3, **ENGINES[engine]}
    call |= {"return_dict_in_generate": True, "output_hidden_states": False}
    out = speculated(target, draft, **prompts(rows), **call, **settings)
    assert torch.equal(out.sequences, plain) and 0 < out.speculation.acceptance_rate < 1
    assert not any(seen) and (len(seen) > 4) == (engine not in PREPARED)
    kept = (*kept_engines(target, compile=True), *kept_engines(target, compile=False))
    assert any(one.steps for one in kept) == (engine in PREPARED)
