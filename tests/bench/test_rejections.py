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
from hf_specdec.bench.figures.passes import Costs
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.replaced_tokens import rejected, replaced
from hf_specdec.bench.settings import Settings

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
        found = replaced(pair, Prompt(0, "qa", tuple(ids)), answer, Settings(max_new_tokens=MOST))
        for place, (own, text) in found.items():
            assert own == answer
            assert text[:place] == answer[:place] and text[place] != answer[place]
            ended = text[place] == 1 or place + 1 == MOST
            assert text == (text[: place + 1] if ended else answered(pair, ids, text[: place + 1]))
        seen += len(found)
        for lookahead in (1, 4):
            decoding = SpeculativeDecoding(pair.draft, num_assistant_tokens=lookahead)
            assert answered(pair, ids, [], custom_generate=decoding) == answer
            rounds = rejections.rounds_of(len(answer), lookahead, found)
            reached = [place + kept for place, drafted, kept in rounds if kept < drafted]
            assert decoding.stats is not None and len(decoding.stats.rounds) == len(rounds)
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
    # Verifications cost the same at any width, and drafts nothing: what counts is rounds.
    passes = Costs({1: 0.0}, {1: 1.0})
    for lookahead in (1, 4):
        gains = [rejections.oracle_gain(made, lookahead, [lookahead], passes) for made in (none, answers, all_)]
        shares = [rejections.harmless_share(made, lookahead) for made in (none, answers, all_)]
        assert all(gains) and all(shares)
        assert [gain.value for gain in gains if gain] == sorted(gain.value for gain in gains if gain)
        assert gains[0] and gains[1] and gains[2] and shares[0] and shares[1] and shares[2]
        assert gains[0].value == 1 and gains[1].faster and gains[1].value < gains[2].value
        assert (shares[0].value, shares[2].value) == (0, 1) and 0.3 < shares[1].value < 0.7
        lossless = sum(len(rejections.rounds_of(n, lookahead, [p for p, _ in found])) for n, found in answers)
        assert gains[2].value == pytest.approx(lossless / sum(-(-n // (lookahead + 1)) for n, _ in answers))
    assert rejections.harmless_share([(3, [])], 4) is None


def test_a_perfect_fallback_saves_the_drafts_that_are_rejected() -> None:
    """Ten tokens of which every fifth draft is rejected; a draft step takes 1 second, a verification 2."""
    passes = Costs({1: 1.0}, {1: 2.0})
    answers = [(10, [(4, False), (9, True)])] * 2
    assert rejections.rounds_of(10, 6, [4, 9]) == [(0, 6, 4), (5, 5, 4)]
    gains = {
        (most, perfect): found.value
        for most in (2, 6)
        for perfect in (False, True)
        if (found := rejections.oracle_gain(answers, 6, [most], passes, perfect_fallback=perfect)) is not None
    }
    # Lossless: (6 + 2) + (5 + 2) seconds. Drafting 2: rounds at 0, 3, 5 and 8, of which the second keeps one.
    assert gains == {(6, False): 15 / 15, (6, True): 15 / 13, (2, False): 15 / 16, (2, True): 15 / 15}
    both = rejections.oracle_gain(answers, 6, [2, 6], passes)
    assert both is not None and both.value == gains[6, False], "the fastest lookahead counts"


def test_in_sampling_rejections_and_rejected_tokens_follow_the_rule_s_distribution(pair: LoadedPair) -> None:
    ids = (encoder_prompts if pair.encoder_decoder else prompts)(1, seed=0)["input_ids"][0].tolist()
    settings = Settings(do_sample=True, temperature=0.7, top_k=5, max_new_tokens=MOST)
    answer = answered(pair, ids, [])
    text = torch.tensor([[0, *answer[:-1]] if pair.encoder_decoder else [*ids, *answer[:-1]]])
    source = {"input_ids": torch.tensor([ids]), "decoder_input_ids": text}
    chances = []
    for model in (pair.target, pair.draft):
        assert model is not None
        with torch.no_grad():
            logits = model(**source if pair.encoder_decoder else {"input_ids": text}).logits[0, -len(answer) :] / 0.7
        least = logits.topk(5).values[:, -1:]
        chances.append(logits.masked_fill(logits < least, -torch.inf).softmax(-1))
    p, q = chances
    own = torch.tensor(answer).unsqueeze(1)
    expected = (1 - q.gather(1, own) / p.gather(1, own)).clamp(min=0).squeeze(1)
    draws, counts, tokens = 400, torch.zeros(len(answer)), torch.zeros_like(p)
    for seed in range(draws):
        for place, token in rejected(pair, Prompt(seed, "qa", tuple(ids)), answer, settings).items():
            counts[place] += 1
            tokens[place, token] += 1
    wide = 5 * (expected * (1 - expected) / draws).sqrt() + 1e-3
    assert ((counts / draws - expected).abs() < wide).all() and expected.max() > 0.1
    most = int(expected.argmax())
    wanted = (q - p).clamp(min=0)[most]
    shares, wanted = tokens[most] / counts[most], wanted / wanted.sum()
    assert ((shares - wanted).abs() < 5 * (wanted * (1 - wanted) / counts[most]).sqrt() + 1e-3).all()
    twin = replace(pair, draft=pair.target)
    assert not any(rejected(twin, Prompt(seed, "qa", tuple(ids)), answer, settings) for seed in range(10))


def test_in_sampling_both_continuations_are_greedy(pair: LoadedPair) -> None:
    ids = (encoder_prompts if pair.encoder_decoder else prompts)(1, seed=1)["input_ids"][0].tolist()
    torch.manual_seed(0)
    answer = answered(pair, ids, [], do_sample=True)
    assert answer != answered(pair, ids, [])
    found = replaced(pair, Prompt(0, "qa", tuple(ids)), answer, Settings(do_sample=True, top_k=0, max_new_tokens=MOST))
    for place, texts in found.items():
        assert texts[0][: place + 1] == answer[: place + 1] and texts[1][:place] == answer[:place]
        for text in texts:
            ended = text[place] == 1 or place + 1 == MOST
            assert text == (text[: place + 1] if ended else answered(pair, ids, text[: place + 1]))
    assert found


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
    assert tradeoff.lossless_reference(result, {**lossy[0], "draft": "large"}) is None
    change = tradeoff.change(result, "lenient", [0, 1, 2])
    assert change is not None and change.value == pytest.approx(-(100 + 50 + 100) / 3)


def test_lossy_strategies_are_compared_at_fastest_lookaheads() -> None:
    """Lossless speculation is fastest at 4, lenience at 8, which the same rounds in fewer seconds stand for."""
    seconds = {("speculative", 4): 2.0, ("speculative", 8): 3.0, ("lenient", 4): 3.0, ("lenient", 8): 1.5}
    calls, methods = [], [method("plain")]
    for (kind, lookahead), took in seconds.items():
        name = f"{kind} {lookahead}"
        calls += [drafted_call([(4, 2), (4, 2)], method=name, seconds=took, prompt=index) for index in range(3)]
        keywords = {"num_assistant_tokens": lookahead} | ({"lenience": 0.1} if kind == "lenient" else {})
        alike = {"engine": "eager", "same_engine": "none eager", "draft": "small", "lookahead": lookahead}
        methods.append(method(name, kind, **alike, keywords=keywords))
    result = result_of(calls, methods)
    lossy = tradeoff.lossy_methods(result)
    assert [one["name"] for one in tradeoff.at_fastest_lookahead(result, lossy)] == ["lenient 8"]
    assert len(tradeoff.at_fastest_lookahead(result, [*lossy, {**lossy[0], "keywords": {"lenience": 0.5}}])) == 2
    for one in lossy:
        reference = tradeoff.lossless_reference(result, one)
        assert reference is not None and reference["name"] == "speculative 4"
    gains = [tradeoff.gain(result, one, [0, 1, 2]) for one in lossy]
    assert [gain.value for gain in gains if gain] == [pytest.approx(1 / 2), pytest.approx(1 / 0.5)]
