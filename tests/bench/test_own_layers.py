"""Measured beside each other: transformers' own drafts by a target's layers, and ours by the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.own_drafters import lend, needs_own_drafters, target_with_mtp
from helpers.tiny_pair import VOCABULARY, tokenizer

from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.running.transformers_methods import own_layers
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.tasks.engines import compared

pytestmark = needs_own_drafters


def test_the_layers_draft_in_both_loops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target, mtp = target_with_mtp("Glm4MoeForCausalLM", 2, vocab_size=VOCABULARY)
    lend(monkeypatch, target, mtp)
    target.generation_config.pad_token_id = 0
    pair = LoadedPair("with layers", target, tokenizer())
    settings = Settings(
        task="engines", model_name="with layers", drafter="mtp", assisted_generation=True, max_new_tokens=12,
        batch_sizes=(1, 2), engines=("recorded",), grid={"num_assistant_tokens": (2,)}, output_dir=tmp_path,
    )  # fmt: skip
    assert not settings.uses_draft
    (prompt,) = benchmark_prompts(pair, (20,), 1, 12)
    found = {one.method.name: one for one in compared(settings, pair)}
    texts = timed_call(plain(pair), [prompt], settings).tokens
    for name in ("use_mtp", "drafter mtp, speculative, γ = 2, recorded"):
        call = timed_call(found[name], [prompt], settings)
        assert call.tokens == texts
        assert len(call.steps) - 1 == 2, "passes of layers in a round"
    recurrent, _ = target_with_mtp("Qwen3_5ForCausalLM", 1)
    assert not own_layers(settings, replace(pair, target=recurrent))
