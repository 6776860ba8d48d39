"""Texts that a target writes for drafts are drawn from the same distribution as in plain `generate`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.models import llama
from helpers.tiny_pair import tokenizer
from torch import Tensor

from hf_specdec.bench.aligning.drawing import SAMPLED, DrawnToken, drawing
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.settings import Settings

ROWS, TOP_K, TEMPERATURE = 20_000, 5, 0.7


def distance(drawn: Tensor, probabilities: Tensor) -> float:
    """Pearson's chi-squared of drawn tokens `[N]`, over their degrees of freedom; infinite for impossible ones."""
    counts = torch.bincount(drawn, minlength=len(probabilities)).double()
    possible = probabilities > 0
    if counts[~possible].any():
        return float("inf")
    expected = probabilities[possible].double() * len(drawn)
    return float(((counts[possible] - expected) ** 2 / expected).sum() / (len(expected) - 1))


@pytest.fixture
def scores() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(12)


def wanted(scores: Tensor, top_k: int, temperature: float) -> Tensor:
    kept = scores >= scores.topk(top_k).values[-1]
    return torch.softmax((scores / temperature).masked_fill(~kept, -torch.inf), dim=-1)


def test_tokens_are_drawn_from_the_most_likely_ones(scores: Tensor) -> None:
    drawn = DrawnToken(TOP_K, TEMPERATURE)(torch.zeros(ROWS, 1).long(), scores.expand(ROWS, -1)).argmax(dim=-1)
    assert distance(drawn, wanted(scores, TOP_K, TEMPERATURE)) < 4
    assert distance(drawn, wanted(scores, TOP_K, 1.0)) > 20  # another temperature is told apart
    assert distance(drawn, wanted(scores, TOP_K - 1, TEMPERATURE)) == float("inf")


def test_more_tokens_than_the_vocabulary_are_all(scores: Tensor) -> None:
    drawn = DrawnToken(50, 1.0)(torch.zeros(ROWS, 1).long(), scores.expand(ROWS, -1)).argmax(dim=-1)
    assert distance(drawn, wanted(scores, len(scores), 1.0)) < 4


@pytest.mark.parametrize(("settings", "faster"), [(SAMPLED, True), ({**SAMPLED, "top_p": 0.9}, False), ({}, False)])
def test_only_top_k_is_drawn_in_another_way(settings: dict[str, Any], faster: bool, monkeypatch) -> None:
    """Plain `generate` then calls no `multinomial`, and its answers differ between seeds."""
    loaded = LoadedPair("target", llama(), tokenizer())
    contender, drawn = drawing(plain(loaded), Settings(max_new_tokens=9, **settings))
    assert (drawn.do_sample, "logits_processor" in contender.models) == (bool(settings) and not faster, faster)
    if faster:
        monkeypatch.setattr(torch, "multinomial", None)
    prompt = Prompt(0, "x", (3, 4, 5))
    answers = {timed_call(contender, [prompt], replace(drawn, seed=seed)).tokens for seed in range(3)}
    assert len(answers) == (3 if settings else 1)


def test_a_target_s_own_settings_are_kept() -> None:
    loaded = LoadedPair("target", llama(), tokenizer())
    unset = Settings(**{**SAMPLED, "temperature": None})
    assert drawing(plain(loaded), unset)[1] is unset
    loaded.target.generation_config.min_p = 0.1
    assert drawing(plain(loaded), Settings(**SAMPLED))[1].do_sample
