"""Packs: several answers to one prompt in one text are read as if each stood alone after it."""

from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import transformers
from helpers import models
from helpers.generating_classes import small_pair
from transformers import PreTrainedModel

from hf_specdec.bench.aligning import batches
from hf_specdec.bench.aligning.batches import IGNORED, answer_logits
from hf_specdec.bench.aligning.packing import PACKED, Packs

PROMPTS = ([5, 6, 7], [8, 9, 10, 11, 12])


def answers(counts: tuple[int, ...] = (11, 2)) -> datasets.Dataset:
    """Answers of different lengths, one of a single token, to each prompt; distributions over three tokens."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for prompt, count in zip(PROMPTS, counts, strict=True):
        for number in range(count):
            answer = torch.randint(2, 30, (1 + number % 6,), generator=draw).tolist()
            likely = [[token, 1, 0] for token in answer]
            log_probs = torch.randn(len(answer), 4, generator=draw).log_softmax(-1).tolist()
            rows.append({"prompt": prompt, "answer": answer, "target_tokens": likely, "target_log_probs": log_probs})
    return datasets.Dataset.from_list(rows)


def packs_of(rows: datasets.Dataset) -> Packs:
    pair: Any = SimpleNamespace(encoder_decoder=False, tokenizer=SimpleNamespace(pad_token_id=0))
    pair.target = models.llama()
    return Packs(pair, rows)


def small(name: str) -> PreTrainedModel:
    return small_pair(getattr(transformers, name), torch.float64)[0]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "Qwen2ForCausalLM", "Gemma3ForCausalLM"])
def test_logits_are_those_of_single_answers(name: str, monkeypatch) -> None:
    """And not where answers see each other: the control."""
    model, rows = small(name), answers()
    packs = packs_of(rows)
    assert [len(members) for members in packs.dataset["members"]] == [PACKED, 3, 2] and packs.several
    together = packs(list(packs.dataset))
    apart = packs([rows[place] for place in range(len(rows))])
    with torch.no_grad():
        expected = answer_logits(model, apart).split([len(row["answer"]) for row in rows])
        found = answer_logits(model, together)
    kept, begins = [], {members[0] for members in packs.dataset["members"]}
    for place, logits in enumerate(expected):
        kept.append(logits if place in begins else logits[1:])
    torch.testing.assert_close(found, torch.cat(kept))
    assert len(found) == len(together["target_tokens"]) == int((together["labels"] != IGNORED).sum())
    assert together["target_tokens"][:, 0].tolist() == together["labels"][together["labels"] != IGNORED].tolist()
    assert packs.suit(model)
    monkeypatch.setattr(batches, "visible", lambda segments: (segments >= -1).unsqueeze(-2).tril().unsqueeze(1))
    assert not packs.suit(model)


@pytest.mark.parametrize("name", ["BloomForCausalLM", "MptForCausalLM"])
def test_models_that_can_not_read_packs_are_known(name: str) -> None:
    assert not packs_of(answers()).suit(small(name))


def test_a_window_shorter_than_the_text_is_known() -> None:
    model, packs = small("Gemma3ForCausalLM"), packs_of(answers())
    assert packs.suit(model)
    model.config.sliding_window = 4
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 4
    assert not packs.suit(model)


def test_prompts_that_differ_are_not_packed() -> None:
    assert not packs_of(answers((1, 1))).several
