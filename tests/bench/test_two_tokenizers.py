"""A draft with another tokenizer is measured as a user would call it: with both tokenizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.families import pair, prompts
from helpers.word_tokenizer import word_tokenizer

import hf_specdec
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.methods import ours

SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("order", [1, 5])
def test_both_tokenizers_reach_the_call(order: int) -> None:
    target, draft = pair("llama")
    tokenizers = word_tokenizer(48), word_tokenizer(48, order)
    loaded = LoadedPair("target", target, tokenizers[0], draft_name="draft", draft=draft, draft_tokenizer=tokenizers[1])
    method = ours("speculative", {"num_assistant_tokens": 3}, loaded)
    assert (method.options["tokenizer"], method.options["assistant_tokenizer"]) == tokenizers
    with method.surroundings(loaded):
        out = target.generate(**prompts(1), **SETTINGS, **method.options)
    assert torch.equal(out, target.generate(**prompts(1), **SETTINGS)) and hf_specdec.last_speculation(target)
    assert "tokenizer" not in ours("speculative", {"drafter": "suffix"}, loaded).options
