"""Greedy speculation gives plain `generate`'s tokens: every family, drafter, cache, batch and lookahead."""

import functools
from typing import Any

import pytest
import torch
import transformers
from helpers.families import (
    EAGER,
    EOS,
    FAMILIES,
    PAD,
    VOCABULARY,
    bart,
    exact_dtype,
    pair,
    pair_of,
    prompts,
    repetitive,
)
from helpers.identity import same_as_plain, speculated
from helpers.memory import LargeStorages
from helpers.pairwise import pairwise
from helpers.patches import choose_in_turn, copy_wherever_possible
from helpers.word_tokenizer import word_tokenizer
from packaging.version import Version

import hf_specdec
from hf_specdec.drafting import drafter_choice
from hf_specdec.host import transcript
from hf_specdec.models import dynamic_runner, static_runner
from hf_specdec.models.cache_names import cache_of
from hf_specdec.models.traits import takes_row_positions

GREEDY = {"max_new_tokens": 16, "do_sample": False}
DRAFTERS: dict[str, dict[str, Any]] = {
    "model": {},
    "bild": {"generation_strategy": "bild", "fallback_threshold": 0.03, "rollback_threshold": 0.0},
    "suffix": {"drafter": "suffix", "assistant_model": None},
    "hybrid": {"drafter": "hybrid"},
    "chosen": {"drafter": "auto", "num_assistant_tokens": "auto"},
    "none": {"drafter": "none", "assistant_model": None},
    "entropy": {"entropy_threshold": 0.3},
    "auto": {"num_assistant_tokens": "auto"},
    "other tokenizer": {
        "tokenizer": word_tokenizer(VOCABULARY),
        "assistant_tokenizer": word_tokenizer(VOCABULARY, order=-1),
    },
}
CACHES: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"cache_implementation": "static"},
    "off": {"use_cache": False},
    "prompt in chunks": {"prefill_chunk_size": 4},
}


@functools.cache
def rows_by_family() -> dict[str, list[tuple[Any, ...]]]:
    """Rows in which any two values meet: the last is for how many tokens memory is taken at once."""
    axes = FAMILIES, DRAFTERS, CACHES, (1, 4), (1, 4, 7), (10, 5), (2, 512)
    rows = pairwise(*map(tuple, axes))
    return {family: [row[1:] for row in rows if row[0] == family] for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_plain_generate(family: str, monkeypatch, no_name_is_outdated: None) -> None:
    """Automatic lengths have rounds without drafts among rounds with many. No call uses an outdated name.

    Where little memory is taken, the host looks at drafts every four steps, as on an accelerator.
    """
    choose_in_turn(monkeypatch, 3, 0, 0, 5, 1, 0, 0, 0, 16)
    copy_wherever_possible(monkeypatch)
    rates, drafted, varied, plain = [], set(), 0, {}
    pairs = {rows: pair(family, dtype=exact_dtype(family, rows)) for rows in (1, 4)}
    for drafter, cache, batch_size, lookahead, seed, foreseen in rows_by_family()[family]:
        for module in (transcript, dynamic_runner, static_runner):
            monkeypatch.setattr(module, "FORESEEN_TOKENS", foreseen)
        monkeypatch.setattr(drafter_choice, "_steps_per_sync", lambda *_, at_once=foreseen == 2: 4 if at_once else 1)
        (target, draft), inputs, case = pairs[batch_size], repetitive(batch_size, seed=seed), (batch_size, seed)
        settings = {"num_assistant_tokens": lookahead, **DRAFTERS[drafter], **CACHES[cache]}
        out = same_as_plain(target, draft, inputs, GREEDY, plain.get(case), **settings)
        plain[case] = out.sequences
        rates.append(out.speculation.acceptance_rate)
        drafted |= {drafter} if out.speculation.drafted else set()
        varied = max(varied, len(out.sequences[0, -GREEDY["max_new_tokens"] :].unique()))
    assert varied > 5, "a target that repeats itself proves little"
    assert any(0 < rate < 1 for rate in rates if rate is not None), "acceptance is neither 0 nor 1"
    assert drafted == set(DRAFTERS) - {"none"}


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "t5"])
def test_no_maximum_length_is_too_large(family: str) -> None:
    """The `model_max_length` of a tokenizer that knows none is int(1e30)."""
    target, draft = pair(family)
    call = {**prompts(2), "do_sample": False, "eos_token_id": list(range(3, VOCABULARY, 4))}
    plain = target.generate(**call, max_new_tokens=100)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        for limit in ({"max_length": int(1e30)}, {"max_new_tokens": float("inf")}):
            with LargeStorages(1 << 20) as large:
                assert torch.equal(target.generate(**call, **limit), plain)
            assert large.peak == 0


def test_a_relaxed_target_gives_other_tokens() -> None:
    """Negative control: the comparison above can fail."""
    settings = {"generation_strategy": "bild", "rollback_threshold": 8.0, "fallback_threshold": 0.0}
    with pytest.raises(AssertionError):
        same_as_plain(*pair("llama"), prompts(4), GREEDY, **settings)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "t5", "bart"])
def test_a_row_of_a_batch_equals_its_single_run(family: str) -> None:
    target, draft = pair(family)
    inputs = prompts(4)
    with hf_specdec.enable(target, generation_strategy="speculative", assistant_model=draft):
        together = target.generate(**inputs, **GREEDY)
        for row in range(4):
            alone = target.generate(**{key: value[row : row + 1] for key, value in inputs.items()}, **GREEDY)
            assert torch.equal(together[row, : alone.shape[1]], alone[0])
            assert (together[row, alone.shape[1] :] == PAD).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_target_pass_a_round_for_the_whole_batch(family: str) -> None:
    """A target as its own draft accepts everything."""
    target, draft = pair(family, dtype=exact_dtype(family, 4))
    itself = same_as_plain(target, target, prompts(4), GREEDY)  # tries a model that does not say how its passes are
    assert itself.speculation.acceptance_rate == 1.0
    passes = []
    target.register_forward_hook(lambda *_: passes.append(1))
    out = speculated(target, draft, **prompts(4), **GREEDY, return_dict_in_generate=True)
    rounds = out.speculation.rounds
    row_by_row = not takes_row_positions(target)
    assert len(passes) == (out.speculation.target_passes if row_by_row else len(rounds))
    assert any(len(set(r.accepted)) > 1 for r in rounds), "rows accept different lengths"
    assert (family == "bart") == row_by_row


@pytest.mark.parametrize("name", ["Pegasus", "Marian"])
def test_others_that_run_row_by_row(name: str) -> None:
    head = "MTModel" if name == "Marian" else "ForConditionalGeneration"
    target, draft = pair_of(bart(name, head, scale_embedding=True))
    for batch_size in (1, 4):
        out = same_as_plain(target, draft, prompts(batch_size), GREEDY, num_assistant_tokens=4)
        assert max(len(row.unique()) for row in out.sequences) > 5
        assert 0 < out.speculation.acceptance_rate < 1
    assert not takes_row_positions(target)


@pytest.mark.parametrize("family", EAGER)
def test_left_padding_in_float64_is_nan_in_transformers(family: str) -> None:
    """Which is why these are compared in float32 here, and why docs/families.md says so; not Gemma 2 in 5.17."""
    affected = family != "gemma2" or Version(transformers.__version__) >= Version("5.23")
    for dtype in (torch.float64, torch.float32):
        logits = pair(family, dtype=dtype)[0](**prompts(4)).logits[1:, -1]
        assert bool(logits.isnan().any()) is (affected and dtype == torch.float64)


@pytest.mark.parametrize(
    ("family", "cache"), [("t5", {}), ("llama", {}), ("llama", {"cache_implementation": "static"})], ids=str
)
def test_num_return_sequences(family: str, cache: dict[str, str]) -> None:
    call = {"max_new_tokens": 12, "do_sample": True, "top_k": 1, "num_return_sequences": 3}
    same_as_plain(*pair(family), prompts(2), call, **cache)


def test_the_cache_returned_is_the_one_plain_generate_returns() -> None:
    target, draft = pair("llama")
    call = {**prompts(1), **GREEDY, "return_dict_in_generate": True, "eos_token_id": None}
    plain, ours = (target.generate(**call, custom_generate=c) for c in (None, hf_specdec.SpeculativeDecoding(draft)))
    for mine, theirs in zip(cache_of(ours).layers, cache_of(plain).layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys)
        torch.testing.assert_close(mine.values, theirs.values)
    assert ours.sequences[0, -1] != EOS
