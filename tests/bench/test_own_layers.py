"""Measured beside each other: transformers' own drafts by a target's layers, and ours by the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.eagle_drafts import stored
from helpers.own_drafters import lend, needs_own_drafters, target_and_block_draft, target_with_mtp
from helpers.tiny_pair import VOCABULARY, tokenizer

from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.running.transformers_methods import own_drafts
from hf_specdec.bench.settings import BenchError, Settings
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
    assert not own_drafts(settings, replace(pair, target=recurrent))
    with pytest.raises(BenchError, match=r"has no num_mtp_layers.*choose another drafter"):
        own_drafts(settings, replace(pair, target=target_and_block_draft("LlamaForCausalLM")[0]))


def test_a_dflash_draft_is_loaded_and_drafts_in_both_loops(tmp_path: Path) -> None:
    target, draft = target_and_block_draft("LlamaForCausalLM", vocab_size=VOCABULARY)
    target.generation_config.pad_token_id = 0
    for model, name in ((target, "target"), (draft, "blocks")):
        model.save_pretrained(tmp_path / name)
    tokenizer().save_pretrained(tmp_path / "target")
    settings = Settings(
        task="engines", model_name=str(tmp_path / "target"), assistant_model=str(tmp_path / "blocks"), dtype="float64",
        drafter="dflash", assisted_generation=True, max_new_tokens=12, batch_sizes=(1, 2), engines=("recorded",),
        grid={"num_assistant_tokens": (3,)}, output_dir=tmp_path,
    )  # fmt: skip
    pair = load_pair(settings)
    (prompt,) = benchmark_prompts(pair, (20,), 1, 12)
    found = {one.method.name: one for one in compared(settings, pair)}
    texts = timed_call(plain(pair), [prompt], settings).tokens
    for name in ("dflash", "drafter dflash, speculative, γ = 3, recorded"):
        assert timed_call(found[name], [prompt], settings).tokens == texts
    with pytest.raises(BenchError, match="is a DFlash draft; add"):
        load_pair(replace(settings, drafter=None))
    with pytest.raises(BenchError, match="not a DFlash draft; leave out"):
        load_pair(replace(settings, assistant_model=str(tmp_path / "target")))


def test_an_eagle_draft_is_loaded_and_drafts_in_our_loop_only(tmp_path: Path) -> None:
    target, _ = target_and_block_draft("LlamaForCausalLM", vocab_size=VOCABULARY)
    target.generation_config.pad_token_id = 0
    target.save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    stored(tmp_path / "eagle", target, range(VOCABULARY // 2))
    settings = Settings(
        task="engines", model_name=str(tmp_path / "target"), assistant_model=str(tmp_path / "eagle"), dtype="float64",
        assisted_generation=True, max_new_tokens=12, batch_sizes=(1, 2), engines=("recorded",),
        grid={"num_assistant_tokens": (3,)}, output_dir=tmp_path,
    )  # fmt: skip
    pair = load_pair(settings)
    (prompt,) = benchmark_prompts(pair, (20,), 1, 12)
    found = {one.method.name: one for one in compared(settings, pair)}
    texts = timed_call(plain(pair), [prompt], settings).tokens
    ours = timed_call(found["speculative, γ = 3, recorded"], [prompt], settings)
    assert ours.tokens == texts
    assert len(ours.steps) > 1
    assert not [name for name in found if "assisted" in name or "ensemble" in name]
    with pytest.raises(BenchError, match="not a DFlash draft; leave out"):
        load_pair(replace(settings, drafter="dflash"))
