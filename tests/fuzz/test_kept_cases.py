"""Cases that random calls once found, kept."""

import pytest
import torch
from fuzz.cases import PROCESSORS
from helpers.families import VOCABULARY, pair, prompts
from helpers.identity import same_as_plain
from helpers.word_tokenizer import word_tokenizer

import hf_specdec


@pytest.mark.parametrize("family", ["gpt-j", "gpt-neox", "llama"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_whose_mask_is_all_zeros(family: str, use_cache: bool) -> None:
    """Its last prompt token attends evenly to all keys of its pass, so no draft may be among them."""
    target, draft = pair(family)
    inputs = {"input_ids": torch.tensor([[3], [0]]), "attention_mask": torch.tensor([[1], [0]])}
    call = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "use_cache": use_cache}
    same_as_plain(target, draft, inputs, call, num_assistant_tokens=1)


@pytest.mark.parametrize("cache", [None, "static"])
def test_the_default_device_is_not_that_of_the_models(cache: str | None) -> None:
    """Processors that read the text got the scores of other positions."""
    target, draft = pair("llama")
    call = {**prompts(3), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "repetition_penalty": 1.7}
    call["logits_processor"] = [PROCESSORS["own"]["logits_processor"][0]]
    expected = target.generate(**call)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"), torch.device("meta"):
        assert torch.equal(target.generate(**call, cache_implementation=cache), expected)


def test_a_batch_without_rows_is_refused_by_name() -> None:
    target, draft = pair("llama")
    empty = torch.zeros(0, 5, dtype=torch.long)
    enabled = hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative")
    with enabled, pytest.raises(ValueError, match=r"input_ids has the shape \[0, 5\]"):
        target.generate(empty, max_new_tokens=3)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_static_cache_of_the_target_is_not_asked_of_a_draft_with_another_tokenizer(family: str) -> None:
    target, draft = pair(family)
    call = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    tokenizers = {"tokenizer": word_tokenizer(VOCABULARY), "assistant_tokenizer": word_tokenizer(VOCABULARY, -1)}
    same_as_plain(target, draft, prompts(1), call, **tokenizers)
