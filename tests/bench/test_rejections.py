"""Harmless rejections, the oracle, and the loss of lossy strategies, recomputed by simpler code."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.made_up_results import drafted_call, method, plain_call, result_of
from helpers.models import encoder_prompts, llama, noisy, prompts, t5

from hf_specdec import SpeculativeDecoding
from hf_specdec.bench.figures import rejections, tradeoff
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.replaced_tokens import replaced

MOST = 18


class NoTokenizer:
    """All that is asked of it here."""

    pad_token_id = 0


@pytest.fixture(scope="module", params=["llama", "t5"])
def pair(request: pytest.FixtureRequest) -> LoadedPair:
    target = llama() if request.param == "llama" else t5()
    return LoadedPair("target", target, NoTokenizer(), draft=noisy(target, 0.1), draft_name="draft")  # type: ignore[arg-type]


def answered(pair: LoadedPair, ids: list[int], begun: list[int], **more: Any) -> list[int]:
    """The target's greedy answer, from a beginning."""
    text = torch.tensor([ids if pair.encoder_decoder else [*ids, *begun]])
    call: dict[str, Any] = {
        "input_ids": text,
        "attention_mask": torch.ones_like(text),
        "do_sample": False,
        "max_new_tokens": MOST - len(begun),
        **more,
    }
    if pair.encoder_decoder:
        call["decoder_input_ids"] = torch.tensor([[0, *begun]])
    return pair.target.generate(**call)[0, 1 if pair.encoder_decoder else len(ids) :].tolist()


def test_each_replaced_token_is_followed_by_the_target_s_own_text_and_rounds_are_the_loop_s(pair: LoadedPair) -> None:
    made = encoder_prompts if pair.encoder_decoder else prompts
    seen, refused = 0, 0
    for seed in range(2):
        ids = made(1, seed=seed)["input_ids"][0].tolist()
        answer = answered(pair, ids, [])
        found = replaced(pair, Prompt(0, "qa", tuple(ids)), answer, MOST)
        for place, text in found.items():
            assert text[:place] == answer[:place] and text[place] != answer[place]
            ended = text[place] == 1 or place + 1 == MOST
            assert text == (text[: place + 1] if ended else answered(pair, ids, text[: place + 1]))
        seen += len(found)
        for lookahead in (1, 4):
            decoding = SpeculativeDecoding(pair.draft, num_assistant_tokens=lookahead)
            assert answered(pair, ids, [], custom_generate=decoding) == answer
            rounds, reached = rejections.rounds_of(len(answer), lookahead, found)
            assert decoding.stats is not None and len(decoding.stats.rounds) == rounds
            assert sum(r.accepted[0] < r.drafted[0] for r in decoding.stats.rounds) == len(
                [place for place in reached if place < MOST - 1]
            )
            refused += len(reached)
    assert seen > 4 and refused > 4


def test_an_oracle_lies_between_lossless_speculation_and_no_rejections() -> None:
    chance = random.Random(0)
    answers = []
    for _ in range(30):
        length = chance.randint(5, 40)
        places = sorted(chance.sample(range(length), length // 3))
        answers.append((length, [(place, chance.random() < 0.5) for place in places]))
    none, all_ = ([(n, [(place, flag) for place, _ in found]) for n, found in answers] for flag in (False, True))
    for lookahead in (1, 4):
        gains = [rejections.oracle_gain(made, lookahead) for made in (none, answers, all_)]
        shares = [rejections.harmless_share(made, lookahead) for made in (none, answers, all_)]
        assert all(gains) and all(shares)
        assert [gain.value for gain in gains if gain] == sorted(gain.value for gain in gains if gain)
        assert gains[0] and gains[1] and gains[2] and shares[0] and shares[1] and shares[2]
        assert gains[0].value == 1 and gains[1].faster and gains[1].value < gains[2].value
        assert (shares[0].value, shares[2].value) == (0, 1) and 0.3 < shares[1].value < 0.7
        lossless = sum(rejections.rounds_of(n, lookahead, [p for p, _ in found])[0] for n, found in answers)
        assert gains[2].value == pytest.approx(lossless / sum(-(-n // (lookahead + 1)) for n, _ in answers))
    assert rejections.harmless_share([(3, [])], 4) is None


def test_the_loss_is_held_against_the_mean_of_the_lossless_methods() -> None:
    """References of two facts: plain has both, speculative decoding one (in sampling it may), the lossy row none."""
    calls = []
    for name, text in (("plain", "a. b."), ("speculative", "a. c."), ("lenient", "c. d."), ("block", "a. b.")):
        call = plain_call() if name == "plain" else drafted_call([(4, 2), (4, 2)], method=name)
        calls += [replace(call, prompts=(index,), texts=[text]) for index in range(3)]
    alike = {"engine": "eager", "same_engine": "none eager", "lookahead": 4, "draft": "small"}
    methods = [
        method("plain"),
        method("block", "speculative", **alike, keywords={"verification": "block"}),
        method("speculative", **alike),
        method("lenient", **alike, keywords={"lenience": 0.1}),
    ]
    result = result_of(calls, methods)
    for prompt in result["prompts"]:
        prompt["references"] = ["a. b."]
    lossy = tradeoff.lossy_methods(result)
    assert [one["name"] for one in lossy] == ["lenient"]
    reference = tradeoff.lossless_reference(result, lossy[0])
    assert reference is not None and reference["name"] == "speculative", "the same verification"
    assert tradeoff.lossless_reference(result, {**lossy[0], "lookahead": 5}) is None
    change = tradeoff.change(result, "lenient", [0, 1, 2])
    assert change is not None and change.value == pytest.approx(-(100 + 50 + 100) / 3)
