"""A grammar library under speculation: xgrammar's processor follows each row by a matcher, and asserts that it can."""

from __future__ import annotations

import copy
import re
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.distributions import FALSE_FAILURE, chi_square_odds, replayed, sampled
from helpers.models import llama, noisy
from helpers.pairwise import pairwise
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import SpeculativeDecoding
from hf_specdec.embedded import model_path

xgrammar = pytest.importorskip("xgrammar")
hf = pytest.importorskip("xgrammar.contrib.hf")

RECORD = r'\{"name": "[A-Z][a-z]{2,8}", "age": [1-9][0-9]?\}'
WORD = "(no|yes|perhaps)"
Pair = tuple[PreTrainedModel, PreTrainedModel]


class Grammar(hf.LogitsProcessor):  # type: ignore[misc, name-defined]
    """xgrammar's processor with a fork, as docs/settings.md has it."""

    def fork(self) -> Grammar:
        """An independent copy in the same state."""
        twin = copy.copy(self)
        twin.matchers = [matcher.fork() for matcher in self.matchers]
        twin.token_bitmask = None if self.token_bitmask is None else self.token_bitmask.clone()
        return twin


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path("target"))


@pytest.fixture(scope="module")
def pair(tokenizer: PreTrainedTokenizerBase) -> Pair:
    """Tiny models with the vocabulary of the embedded ones."""
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    target = llama(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, **special)
    return target, noisy(target, 0.1)


@pytest.fixture(scope="module")
def compiled(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiler = xgrammar.GrammarCompiler(info)
    return {regex: compiler.compile_regex(regex) for regex in (RECORD, WORD)}


def inputs(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, Tensor]:
    questions = [
        "Who owns the lamp?", "Describe the owner of the yellow carpet.", "Who is it?", "Name and age, please.",
    ]  # fmt: skip
    return dict(tokenizer(questions[:rows], padding=True, padding_side="left", return_tensors="pt"))


@pytest.mark.parametrize(
    ("drafter", "kind", "rows"), pairwise(("none", "suffix", "model", "hybrid"), (hf.LogitsProcessor, Grammar), (1, 4))
)
def test_greedy_tokens_are_plain_s(pair, tokenizer, compiled, rows: int, kind: type, drafter: str) -> None:
    call = {**inputs(tokenizer, rows), "do_sample": False, "max_new_tokens": 32}
    decoding = SpeculativeDecoding(pair[1], drafter=drafter)
    expected, output = (
        pair[0].generate(**call, logits_processor=[kind(compiled[RECORD])], custom_generate=custom)
        for custom in (None, decoding)
    )
    assert torch.equal(output, expected)
    new = output[:, call["input_ids"].shape[1] :]
    assert all(re.fullmatch(RECORD, text) for text in tokenizer.batch_decode(new, skip_special_tokens=True))
    if kind is Grammar and drafter == "model":
        assert decoding.stats.acceptance_rate > 0.2 and decoding.stats.tokens_per_round > 1.3


@pytest.mark.parametrize(("kind", "rows"), [(hf.LogitsProcessor, 4), (Grammar, 1), (Grammar, 4)])
def test_sampled_texts_are_distributed_as_plain_s(pair, tokenizer, compiled, rows: int, kind: type) -> None:
    """Over all ways to write the words in tokens."""
    ids, calls, tokens = tokenizer("Is it?", return_tensors="pt")["input_ids"], 40, 5
    found = sampled(pair, ids, lambda target: kind(compiled[WORD]), rows, calls, tokens)
    expected = replayed(pair[0], ids, lambda target: hf.LogitsProcessor(compiled[WORD]), tokens)
    assert len(expected) > 3
    counts = Counter(map(tuple, found.flatten(0, 1).tolist()))
    assert chi_square_odds(counts, expected, calls * rows) > FALSE_FAILURE


def test_control_drafts_that_pass_through_its_matchers(pair, tokenizer, compiled, monkeypatch) -> None:
    """Called for every draft, a matcher refuses a token that it has not allowed."""
    monkeypatch.setattr(hf.LogitsProcessor, "stateless", True, raising=False)
    with pytest.raises(AssertionError):
        pair[0].generate(
            **inputs(tokenizer, 1),
            do_sample=False,
            max_new_tokens=32,
            logits_processor=[hf.LogitsProcessor(compiled[RECORD])],
            custom_generate=SpeculativeDecoding(pair[1]),
        )
