"""Drafting ahead: plain `generate`'s tokens and distribution, and which drafts are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers import distributions
from helpers.distant import Log, drafting_ahead
from helpers.distributions import FALSE_FAILURE, chi_square_odds, exact
from helpers.families import pair, prompts
from helpers.identity import same_as_plain
from helpers.models import PAD, Passes, llama, noisy, resized
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    set_seed,
)

from hf_specdec import SpeculativeDecoding
from hf_specdec.drafting.other_device import AheadDraft, OtherDeviceDrafter
from hf_specdec.models.cache_names import CACHE_NAME, cache_of

NEW_TOKENS = 40
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
VARIANTS = {
    "1": {"num_assistant_tokens": 1},
    "4": {"num_assistant_tokens": 4},
    "no cache": {"num_assistant_tokens": 4},
    "bild": {"generation_strategy": "bild", "rollback_threshold": 0.0, "num_assistant_tokens": 3},
    "entropy": {"entropy_threshold": 0.3, "num_assistant_tokens": 6},
}
# Probabilities that these models' most probable tokens lie about.
SURE = {"llama": 0.1, "gpt2": 0.1, "mistral-sliding": 0.1, "t5": 0.03}


@pytest.fixture
def log(monkeypatch) -> Log:
    return drafting_ahead(monkeypatch)


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *(("llama", variant) for variant in VARIANTS),
        *((family, "4") for family in SURE if family != "llama"),
        ("t5", "bild"),
    ],
)
def test_greedy_tokens_are_those_of_plain_generate(family: str, variant: str, log) -> None:
    target, draft = pair(family, noise=0.03)
    fallback = {"fallback_threshold": SURE[family]} if variant == "bild" else {}
    for seed in (10, 5):
        call = {**GREEDY, "eos_token_id": None, "use_cache": variant != "no cache"}
        with Passes(draft) as passes:
            out = same_as_plain(target, draft, prompts(1, seed=seed), call, **VARIANTS[variant], **fallback)
        assert passes.count == sum(r.draft_steps for r in out.speculation.rounds)
    assert log.kept > 0, "some drafts are kept"
    fresh = sum(proposal.steps > 0 for proposal in log.proposals)
    assert fresh > 3, "and some are not"


@pytest.mark.parametrize("sampling", [False, True])
def test_a_target_as_its_own_draft_is_always_ahead(sampling: bool, log) -> None:
    """Greedy, every guess comes true; in sampling so does every guess that the target happens to draw."""
    target, _ = pair("llama")
    decoding = SpeculativeDecoding(target, num_assistant_tokens=3)
    torch.manual_seed(0)
    call = {"do_sample": sampling, "top_k": 2, "temperature": 0.3} if sampling else {"do_sample": False}
    target.generate(**prompts(1), **call, max_new_tokens=41, eos_token_id=None, custom_generate=decoding)
    assert decoding.stats is not None and decoding.stats.acceptance_rate == 1.0
    steps = [proposal.steps for proposal in log.proposals]
    if sampling:
        assert len(steps) / 3 < log.kept < len(steps)
        assert set(steps) == {0, 3}
    else:
        # 41 tokens are ten rounds of four and one without room for drafts.
        assert steps == [3] + [0] * 10
        assert log.passes_ahead == [4] * 9 + [0] * 2


def test_what_was_read_ahead_and_came_true_is_not_read_again(log) -> None:
    """After the prompt the draft reads token by token, also where all drafts were accepted and the guess was wrong."""
    target, _ = pair("llama")
    draft, widths = deepcopy(target), []
    draft.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    torch.manual_seed(0)
    call = {"do_sample": True, "max_new_tokens": 41, "eos_token_id": None}
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=3)
    target.generate(**prompts(1), **call, custom_generate=decoding)
    assert decoding.stats is not None and decoding.stats.acceptance_rate == 1.0
    assert 0 < log.kept < len(log.proposals) - 1
    assert widths[0] == 11 and set(widths[1:]) == {1}


def test_texts_end_to_the_token(log) -> None:
    """By their length and by EOS, at every place of a round; nothing is drafted beyond."""
    target, draft = pair("llama", noise=0.02)
    call = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    plain = target.generate(**prompts(1), **call)[0, 11:].tolist()
    for end, eos in enumerate(plain[:11], 1):
        for ends in ({"max_new_tokens": end}, {"eos_token_id": eos}):
            same_as_plain(target, draft if end % 2 else target, prompts(1), call | ends, num_assistant_tokens=3)


def test_nothing_is_drafted_ahead_of_an_end(log) -> None:
    """A text of seven tokens: three and one, then two and one; the room for the second round's drafts is two."""
    target, _ = pair("llama")
    for tokens, ahead in ((7, [3, 0]), (5, [0, 0]), (4, [0])):
        log.passes_ahead.clear()
        decoding = SpeculativeDecoding(target, num_assistant_tokens=3)
        call = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None}
        target.generate(**prompts(1), **call, custom_generate=decoding)
        assert log.passes_ahead == ahead


def test_the_draft_s_own_context_bounds_what_is_drafted_ahead(log) -> None:
    target = llama()
    short = noisy(target)
    short.config.max_position_embeddings = 16
    call = {"input_ids": torch.arange(2, 11).unsqueeze(0), "do_sample": False, "max_new_tokens": 20}
    call |= {"attention_mask": torch.ones(1, 9, dtype=torch.long), "eos_token_id": None}
    lengths: list[int] = []
    handle = short.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    output = target.generate(**call, custom_generate=SpeculativeDecoding(short, num_assistant_tokens=3))
    handle.remove()
    assert torch.equal(output, target.generate(**call))
    assert 12 < max(lengths) < 16


@pytest.mark.parametrize("sizes", [(72, 64), (64, 72)])
def test_a_draft_of_another_vocabulary_drafts_ahead(sizes: tuple[int, int], log) -> None:
    target, draft = (resized(model, size) for model, size in zip((llama(), noisy(llama())), sizes, strict=True))
    same_as_plain(target, draft, prompts(1), {**GREEDY, "eos_token_id": None}, num_assistant_tokens=2)
    assert log.kept


class Seen(StoppingCriteria):
    """Remembers what it was shown."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.texts.append(input_ids[0].tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_criteria_scores_and_the_cache_are_as_without(log) -> None:
    target, draft = pair("llama", noise=0.03)
    criteria, outputs = [Seen(), Seen()], []
    call = {**prompts(1), **GREEDY, "output_scores": True, "return_dict_in_generate": True, "eos_token_id": None}
    for seen, decoding in zip(criteria, (None, SpeculativeDecoding(draft)), strict=True):
        outputs.append(
            target.generate(**call, stopping_criteria=StoppingCriteriaList([seen]), custom_generate=decoding)
        )
    assert log.kept
    assert criteria[0].texts == criteria[1].texts
    torch.testing.assert_close(outputs[0].scores, outputs[1].scores)
    for layers in zip(*(cache_of(output).layers for output in outputs), strict=True):
        torch.testing.assert_close(layers[0].keys, layers[1].keys)


def test_a_call_that_breaks_off_while_drafting_ahead_leaves_the_cache_right(log, monkeypatch) -> None:
    target, draft = pair("llama")
    cache, seen, turns = DynamicCache(config=target.config), Seen(), iter([0, 0])
    monkeypatch.setattr(OtherDeviceDrafter, "ahead", lambda self: next(turns))
    with pytest.raises(StopIteration):
        target.generate(
            **prompts(1),
            **GREEDY,
            **{CACHE_NAME: cache},
            stopping_criteria=StoppingCriteriaList([seen]),
            custom_generate=SpeculativeDecoding(draft),
        )
    assert cache.get_seq_length() == len(seen.texts[-1]) - 1


def test_drafts_under_another_text_would_be_rejected(log, monkeypatch) -> None:
    """Control of the comparison: without it the output stays right, as for any drafts, but fewer are accepted."""
    target, draft = pair("llama", noise=0.1)
    rates = []
    for _ in range(2):
        call = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": None}
        out = same_as_plain(target, draft, prompts(1), call, num_assistant_tokens=2)
        rates.append(out.speculation.acceptance_rate)
        monkeypatch.setattr(AheadDraft, "matches", lambda self, ids, lengths: True)
    assert rates[1] < rates[0] - 0.1


TOY_TOKENS = 4
SAMPLES = 350  # the control below fails with as many


@pytest.fixture
def toy_pair(monkeypatch) -> tuple[PreTrainedModel, PreTrainedModel]:
    monkeypatch.setattr(distributions, "NEW_TOKENS", TOY_TOKENS)
    monkeypatch.setattr(distributions, "VOCABULARY", 4)
    target = llama(seed=5, vocab_size=4, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    return target, noisy(target, 0.35)


def odds_of_single_rows(target: PreTrainedModel, make: Callable[[], SpeculativeDecoding]) -> float:
    """The odds of sampled outputs of one row each."""
    ids, mask = torch.tensor([[2, 3, 2, 2]]), torch.ones(1, 4, dtype=torch.long)
    set_seed(3)
    counts: Counter = Counter()
    for _ in range(SAMPLES):
        output = target.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=TOY_TOKENS,
            custom_generate=make(),
        )[0, 4:].tolist()
        counts[(*output, *[PAD] * (TOY_TOKENS - len(output)))] += 1
    return chi_square_odds(counts, exact(target, ids, mask, {}), SAMPLES)


def test_outputs_are_distributed_as_the_target_s_own(toy_pair, log) -> None:
    """One draft a round, so that the third token may have been drafted ahead."""
    target, draft = toy_pair
    assert odds_of_single_rows(target, lambda: SpeculativeDecoding(draft, num_assistant_tokens=1)) > FALSE_FAILURE
    assert log.kept > 50


def test_control_drafts_ahead_that_only_claim_to_be_drawn_fail(toy_pair, log, monkeypatch) -> None:
    """The most probable tokens, handed out with the distributions that they were not drawn from."""
    ahead = OtherDeviceDrafter.ahead

    def surest(self: OtherDeviceDrafter) -> int:
        self.do_sample = False
        try:
            return ahead(self)
        finally:
            self.do_sample = True

    monkeypatch.setattr(OtherDeviceDrafter, "ahead", surest)
    target, _ = toy_pair
    assert odds_of_single_rows(target, lambda: SpeculativeDecoding(target, num_assistant_tokens=1)) < FALSE_FAILURE
