"""A memory of earlier answers: what it holds, whom it serves, and what it changes."""

import copy
import json
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch
from helpers.families import pair, prompts
from helpers.identity import same_as_plain
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import SuffixMemory
from hf_specdec.drafting import suffix_automaton
from hf_specdec.drafting.suffix_automaton import SuffixAutomaton
from hf_specdec.drafting.suffix_memory import TOKENS_BEFORE
from hf_specdec.lengths.chances import Step

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


def test_it_is_saved_as_json_and_loaded_as_it_was(target: PreTrainedModel, tmp_path) -> None:
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
def test_other_files_are_refused(text: str, tmp_path) -> None:
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


def searched(texts: Sequence[Sequence[int]], end: Sequence[int], order: Sequence[tuple[int, int]]) -> Step | None:
    """What most often followed the longest end of a text that something followed in `texts`, the latest of several.

    Args:
        order: text and place of each token in the order in which they came.
    """
    for length in range(len(end), 0, -1):
        last, followed, latest = list(end[len(end) - length :]), Counter[int](), dict[int, int]()
        for time, (text, place) in enumerate(order):
            if list(texts[text][place - length : place]) == last and place >= length:
                followed[texts[text][place]] += 1
                latest[texts[text][place]] = time
        if followed:
            token = max(followed, key=lambda token: (followed[token], latest[token]))
            return Step(token, length, followed[token], followed.total())
    return None


def grown(seed: int, automaton: SuffixAutomaton) -> tuple[int, int]:
    """The number of places of random texts at which the automaton is right, of those at which something is found."""
    chance = random.Random(seed)
    texts: list[list[int]] = [[] for _ in range(chance.choice((1, 1, 3)))]
    states, order, right, found = [0] * len(texts), list[tuple[int, int]](), 0, 0
    stranger, place = list[int](), (0, 0)
    tokens = chance.choice((2, 3, 8))
    for _ in range(chance.choice((20, 90))):
        row, token = chance.randrange(len(texts)), chance.randrange(tokens)
        order.append((row, len(texts[row])))
        texts[row].append(token)
        states[row] = automaton.append(states[row], token)
        stranger.append(chance.randrange(tokens + 1))
        place = automaton.advance(*place, stranger[-1])
        for steps, text in ((automaton.follow(states[row]), texts[row]), (automaton.follow(*place), stranger)):
            expected = searched(texts, text, order)
            right += next(steps, None) == expected
            found += 1
    return right, found


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_end_and_what_followed_it_equal_a_search(seed: int) -> None:
    """For texts that grow in turn, and for one that only reads where it goes on."""
    right, found = grown(seed, SuffixAutomaton())
    assert right == found


@pytest.mark.parametrize("fault", ["_exact", "MOST_CONTEXTS"])
def test_control_undivided_states_and_few_counted_contexts_are_found_wrong(fault: str, monkeypatch) -> None:
    if fault == "_exact":
        monkeypatch.setattr(SuffixAutomaton, fault, lambda self, context, token, after: after)
    else:
        monkeypatch.setattr(suffix_automaton, fault, 2)
    results = [grown(seed, SuffixAutomaton()) for seed in range(8)]
    assert any(right < found for right, found in results)


def test_a_copy_goes_on_where_it_reaches_the_end_of_the_text() -> None:
    automaton = SuffixAutomaton()
    state = automaton.extend(0, [7, 4, 5, 4, 5])
    assert [step.token for step in islice(automaton.follow(state), 5)] == [4, 5, 4, 5, 4]
    assert not list(automaton.follow(automaton.extend(0, [1, 2, 3])))


@pytest.mark.parametrize("period", [1, 3, 50])
def test_texts_that_repeat_themselves_take_no_more_work(period: int, monkeypatch) -> None:
    """A state a token and the contexts that are counted; not all of a text's repetitions."""
    automaton, states = SuffixAutomaton(), []
    made = SuffixAutomaton._new
    monkeypatch.setattr(SuffixAutomaton, "_new", lambda self, *args: (states.append(1), made(self, *args))[1])
    state = automaton.extend(0, [place % period for place in range(3000)])
    assert len(states) <= 2 * 3000
    assert [step.token for step in islice(automaton.follow(state), 4)] == [(3000 + k) % period for k in range(4)]
