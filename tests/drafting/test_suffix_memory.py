"""A memory of earlier answers: what it holds, whom it serves, and what it changes."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers.families import pair, prompts
from helpers.identity import same_as_plain
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import SuffixMemory
from hf_specdec.drafting.suffix_memory import TOKENS_BEFORE

CALL = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return pair("llama")[0]


def followed(memory: SuffixMemory, model: PreTrainedModel, text: list[int]) -> list[int]:
    """What the memory says follows a text."""
    for automaton in memory.automata(model):
        place = (0, 0)
        for token in text:
            place = automaton.advance(*place, token)
        if found := [step.token for step in islice(automaton.follow(*place), 2)]:
            return found
    return []


@pytest.mark.parametrize("most", [10, 11, 64])
def test_no_more_is_held_than_asked_for_and_the_oldest_goes_first(target: PreTrainedModel, most: int) -> None:
    memory = SuffixMemory(most)
    texts = [[3 * at, 3 * at + 1, 3 * at + 2] for at in range(40)]
    for at, text in enumerate(texts):
        memory.add(target, [text])
        assert len(memory) <= most
        known = [bool(followed(memory, target, one[:1])) for one in texts[: at + 1]]
        assert known == sorted(known) and known[-1], "what is known is the newest"
    assert not all(known)
    memory.add(target, [list(range(1000))])
    assert (len(memory) <= most and followed(memory, target, [998]) == [999, 999][:1] * 1) or most == 2


def test_a_second_call_of_a_prompt_copies_the_first_one_s_answer(target: PreTrainedModel) -> None:
    """Also right after the prompt; without the memory, which is the default, it takes as many rounds as the first."""
    memory, settings = SuffixMemory(), {"drafter": "suffix", "num_assistant_tokens": 7}
    inputs = prompts(2)
    first = same_as_plain(target, None, inputs, CALL, suffix_memory=memory, **settings)
    assert len(memory) == 2 * (TOKENS_BEFORE + CALL["max_new_tokens"])
    again = same_as_plain(target, None, inputs, CALL, first.sequences, suffix_memory=memory, **settings)
    assert len(again.speculation.rounds) == 2 < len(first.speculation.rounds)
    without = same_as_plain(target, None, inputs, CALL, first.sequences, **settings)
    assert len(without.speculation.rounds) == len(first.speculation.rounds)
    memory.clear()
    assert len(memory) == 0 and not memory.automata(target)


@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize("drafter", ["suffix", "hybrid", "model"])
def test_tokens_are_plain_ones_whatever_is_remembered(family: str, drafter: str) -> None:
    """In batches, and with answers to other prompts. The memory is also bound by `enable`."""
    target, draft = pair(family)
    memory = SuffixMemory(100)
    with hf_specdec.enable(suffix_memory=memory):
        for seed in (1, 2, 1):
            for rows in (1, 3):
                same_as_plain(target, draft, prompts(rows, seed=seed), CALL, drafter=drafter)
    assert 50 < len(memory) <= 100


def test_a_failed_call_is_not_remembered(target: PreTrainedModel) -> None:
    memory = SuffixMemory()

    def fails(row: int, text: torch.Tensor) -> list[int]:
        raise KeyError(row)

    with hf_specdec.enable(target, generation_strategy="speculative", drafter="suffix", suffix_memory=memory):
        with pytest.raises(KeyError):
            target.generate(**prompts(1), **CALL, prefix_allowed_tokens_fn=fails)
        assert len(memory) == 0
        target.generate(**prompts(1), **CALL)
        assert len(memory) > 0


def test_it_is_saved_as_json_and_loaded_as_it_was(target: PreTrainedModel, tmp_path: Path) -> None:
    memory, path = SuffixMemory(60), tmp_path / "answers.json"
    memory.add(target, [[place * factor % 23 for place in range(14)] for factor in range(1, 6)])
    memory.save(path)
    assert isinstance(json.loads(path.read_text()), dict)
    loaded = SuffixMemory.load(path)
    assert (len(loaded), loaded.max_tokens) == (len(memory), 60)
    for text in ([5], [2, 4], [9, 12], [3], [22]):
        assert followed(loaded, target, text) == followed(memory, target, text)
    with pytest.raises(ValueError, match="another model"):
        loaded.automata(pair("mistral-sliding")[0])


NO_TOKENS = {"format": "hf_specdec.SuffixMemory 1", "max_tokens": 9, "model": None, "texts": [["a"]]}


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps(NO_TOKENS)])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="was not written by"):
        SuffixMemory.load(path)


def test_models_with_other_tokens_are_refused(target: PreTrainedModel) -> None:
    """By name, by size of the vocabulary and by special tokens; after `clear` it serves another."""
    larger, other_end, named = (copy.deepcopy(target) for _ in range(3))
    larger.resize_token_embeddings(larger.config.vocab_size + 8)
    other_end.generation_config.eos_token_id = 9
    named.config.name_or_path = "another/model"
    memory = SuffixMemory()
    memory.add(target, [[3, 4, 5]])
    for other in (larger, other_end, named):
        with pytest.raises(ValueError, match="suffix_memory holds answers of another model"):
            other.generate(
                **prompts(1), **CALL,
                custom_generate=hf_specdec.SpeculativeDecoding(drafter="suffix", suffix_memory=memory),
            )  # fmt: skip
    memory.clear()
    memory.add(larger, [[3, 4, 5]])
    with pytest.raises(ValueError, match="another model"):
        memory.add(target, [[3, 4, 5]])


@pytest.mark.parametrize("value", [0, 1, True, "many", 2.5])
def test_sizes_that_are_none_are_refused(value) -> None:
    with pytest.raises(ValueError, match=f"max_tokens={value!r}"):
        SuffixMemory(value)


def test_what_is_no_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="suffix_memory='here' must be a"):
        hf_specdec.SpeculativeDecoding(drafter="suffix", suffix_memory="here")


def test_threads_add_while_others_read(target: PreTrainedModel) -> None:
    """Tokens stay plain ones, and nothing is lost but what is too old."""
    memory = SuffixMemory(2000)
    inputs = prompts(1)
    plain = target.generate(**inputs, **CALL)
    decoding = [hf_specdec.SpeculativeDecoding(drafter="suffix", suffix_memory=memory) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        adding = [pool.submit(memory.add, target, [[at % 7, at % 5, at % 3] * 20]) for at in range(60)]
        calls = [pool.submit(target.generate, **inputs, **CALL, custom_generate=one) for one in decoding * 4]
        for call in calls:
            assert torch.equal(call.result(), plain)
        for one in adding:
            one.result()
    assert 1000 - 60 <= len(memory) <= 2000
