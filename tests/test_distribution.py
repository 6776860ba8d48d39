"""Sampling through `generate`: the distribution over whole outputs is the target's exact one.

Every comparison is a chi-square test at odds of 1e-6 of a false failure, and its seed is fixed, so that what
passed once passes again. The negative controls fail it by many orders of magnitude.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from models import EOS, PAD, llama, noisy
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor, set_seed
from transformers.generation import logits_process as host

import hf_specdec
from hf_specdec import SpeculativeDecoding, drafters, sampling
from hf_specdec.drafting import DraftProposal, ModelDrafter

VOCABULARY = 5
NEW_TOKENS = 3
ROWS = 2000
FALSE_FAILURE = 1e-6

STRATEGIES = [("speculative", {}), ("bild", {"rollback_threshold": 0.0, "fallback_threshold": 0.4})]
LOSSLESS = {
    "lookup": {"drafter": "lookup"},
    "hybrid": {"drafter": "hybrid"},
    "block": {"verification": "block", "num_assistant_tokens": 3},
    "auto": {"num_assistant_tokens": "auto"},
    "auto, bild": {"num_assistant_tokens": "auto", "strategy": "bild", **STRATEGIES[1][1]},
    "auto, lookup, block": {"num_assistant_tokens": "auto", "drafter": "lookup", "verification": "block"},
    "entropy": {"entropy_threshold": 0.5},
    "entropy, block": {"entropy_threshold": 0.5, "verification": "block"},
    "block, hybrid": {"verification": "block", "drafter": "hybrid"},
}
PROCESSORS = [
    {},
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.4, "top_p": 0.8},
    {"repetition_penalty": 1.7},
]


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = llama(seed=5, vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    return target, noisy(target, 0.35)


def prompt_batch(length: int, padding: int) -> tuple[Tensor, Tensor]:
    """`ROWS` times the same prompt behind `padding` pads."""
    text = torch.tensor([2, 3, 4, 2, 4, 3])[:length]
    ids = torch.cat([torch.full((padding,), PAD), text]).expand(ROWS, -1)
    return ids, (torch.arange(ids.shape[1]) >= padding).long().expand(ROWS, -1)


def warpers(settings: dict[str, Any], padding: int) -> LogitsProcessorList:
    """The processors that `generate` builds from these settings, in its order; it does not penalise padding."""
    makers = {
        "repetition_penalty": partial(RepetitionPenaltyLogitsProcessor, prompt_ignore_length=padding),
        "temperature": host.TemperatureLogitsWarper,
        "top_k": host.TopKLogitsWarper,
        "top_p": host.TopPLogitsWarper,
    }
    return LogitsProcessorList(make(settings[name]) for name, make in makers.items() if name in settings)


@torch.no_grad()
def exact(target: PreTrainedModel, ids: Tensor, mask: Tensor, settings: dict[str, Any]) -> dict[tuple, float]:
    """The target's distribution over whole outputs, padded after EOS, by teacher forcing every prefix."""
    finished: dict[tuple, float] = {}
    open_prefixes: dict[tuple, float] = {(): 1.0}
    processors = warpers(settings, int((mask[0] == 0).sum()))
    for _ in range(NEW_TOKENS):
        prefixes = list(open_prefixes)
        texts = torch.cat(
            [ids[:1].expand(len(prefixes), -1), torch.tensor(prefixes, dtype=torch.long).view(len(prefixes), -1)], dim=1
        )
        grown = torch.ones(len(prefixes), texts.shape[1] - ids.shape[1], dtype=torch.long)
        masks = torch.cat([mask[:1].expand(len(prefixes), -1), grown], dim=1)
        positions = (masks.cumsum(-1) - 1).clamp(min=0)
        logits = target(texts, attention_mask=masks, position_ids=positions).logits[:, -1].float()
        probs = processors(texts, logits).softmax(-1)
        grown_prefixes = {
            (*prefix, token): open_prefixes[prefix] * probs[i, token].item()
            for i, prefix in enumerate(prefixes)
            for token in range(VOCABULARY)
            if probs[i, token] > 0
        }
        finished |= {p: w for p, w in grown_prefixes.items() if p[-1] == EOS}
        open_prefixes = {p: w for p, w in grown_prefixes.items() if p[-1] != EOS}
    outputs = {**finished, **open_prefixes}
    return {(*prefix, *[PAD] * (NEW_TOKENS - len(prefix))): weight for prefix, weight in outputs.items()}


def chi_square_odds(counts: Counter, expected: dict[tuple, float], samples: int) -> float:
    """The probability of deviations at least as large, small cells pooled; 0 where the impossible occurred."""
    if any(output not in expected for output in counts):
        return 0.0
    cells = [(counts[output], weight * samples) for output, weight in expected.items()]
    large = [(seen, mean) for seen, mean in cells if mean >= 5]
    small = [(seen, mean) for seen, mean in cells if mean < 5]
    pooled = (sum(seen for seen, _ in small), sum(mean for _, mean in small))
    if pooled[1] >= 5:
        large.append(pooled)
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in large)
    half = torch.tensor([(len(large) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def sample(
    pair: tuple[PreTrainedModel, PreTrainedModel],
    ids: Tensor,
    mask: Tensor,
    decoding: SpeculativeDecoding | None,
    **kw: Any,
) -> Tensor:
    """`ROWS` sampled outputs `[ROWS, NEW_TOKENS]`, plain without a decoding."""
    settings = {"do_sample": True, "max_new_tokens": NEW_TOKENS, "top_k": 0, **kw}
    outputs = pair[0].generate(input_ids=ids, attention_mask=mask, custom_generate=decoding, **settings)[
        :, ids.shape[1] :
    ]
    return torch.nn.functional.pad(outputs, (0, NEW_TOKENS - outputs.shape[1]), value=PAD)


def odds(
    pair: tuple[PreTrainedModel, PreTrainedModel], decoding: SpeculativeDecoding | None, **settings: Any
) -> list[float]:
    """The odds of a ragged batch's outputs: half of its rows have a short, padded prompt, half a long one."""
    long_ids, long_mask = prompt_batch(6, 0)
    short_ids, short_mask = prompt_batch(3, 3)
    half = ROWS // 2
    ids = torch.stack([long_ids[:half], short_ids[:half]], dim=1).flatten(0, 1)
    mask = torch.stack([long_mask[:half], short_mask[:half]], dim=1).flatten(0, 1)
    set_seed(11)
    outputs = sample(pair, ids, mask, decoding, **settings).tolist()
    return [
        chi_square_odds(Counter(map(tuple, outputs[kind::2])), exact(pair[0], ids[kind:], mask[kind:], settings), half)
        for kind in (0, 1)
    ]


@pytest.mark.parametrize("settings", PROCESSORS, ids=str)
@pytest.mark.parametrize(("strategy", "thresholds"), STRATEGIES, ids=["speculative", "bild"])
def test_outputs_are_distributed_as_the_target_s_own(pair, strategy: str, thresholds: dict, settings: dict) -> None:
    decoding = SpeculativeDecoding(pair[1], strategy, num_assistant_tokens=2, **thresholds)
    assert min(odds(pair, decoding, **settings)) > FALSE_FAILURE
    assert decoding.stats is not None
    assert 0.1 < decoding.stats.acceptance_rate < 0.95


@pytest.mark.parametrize("settings", PROCESSORS[:2], ids=str)
@pytest.mark.parametrize("variant", LOSSLESS)
def test_every_way_to_draft_and_to_verify_is_lossless(pair, variant: str, settings: dict, monkeypatch) -> None:
    # Prompts of this length repeat single tokens only.
    monkeypatch.setattr(drafters, "HYBRID_SIZES", (1,))
    decoding = SpeculativeDecoding(pair[1], **{"num_assistant_tokens": 2, **LOSSLESS[variant]})
    assert min(odds(pair, decoding, **settings)) > FALSE_FAILURE
    assert decoding.stats is not None
    assert 0.1 < decoding.stats.acceptance_rate < 0.95
    if "entropy" in variant:
        assert len(set(decoding.stats.rounds[0].drafted)) > 1, "it stops some rows and not others"


def test_one_row_and_returned_sequences_are_distributed_as_the_target_s_own(pair) -> None:
    """`num_return_sequences` of one prompt, at another lookahead."""
    ids, mask = prompt_batch(4, 0)
    set_seed(12)
    outputs = (
        pair[0]
        .generate(
            input_ids=ids[:1],
            attention_mask=mask[:1],
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            num_return_sequences=ROWS,
            custom_generate=SpeculativeDecoding(pair[1], num_assistant_tokens=1),
        )[:, 4:]
        .tolist()
    )
    assert chi_square_odds(Counter(map(tuple, outputs)), exact(pair[0], ids, mask, {}), ROWS) > FALSE_FAILURE


def test_the_yardstick_passes_plain_generate(pair) -> None:
    """The enumeration agrees with what transformers itself samples."""
    assert min(odds(pair, None, **PROCESSORS[1])) > FALSE_FAILURE


def test_control_the_draft_s_own_distribution_fails(pair) -> None:
    ids, mask = prompt_batch(6, 0)
    set_seed(13)
    outputs = sample((pair[1], pair[1]), ids, mask, None).tolist()
    assert chi_square_odds(Counter(map(tuple, outputs)), exact(pair[0], ids, mask, {}), ROWS) < FALSE_FAILURE


def test_control_a_draft_judged_by_unprocessed_scores_fails(pair, monkeypatch) -> None:
    """Drawn from the processed distribution, handed out with the raw one: silently not lossless."""
    handed_out = ModelDrafter._choose

    def choose(self: ModelDrafter, ids: Tensor, lengths: Any, logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        _, tokens = handed_out(self, ids, lengths, logits, *rest)
        return sampling.probabilities(logits.float()), tokens

    monkeypatch.setattr(ModelDrafter, "_choose", choose)
    decoding = SpeculativeDecoding(pair[1], num_assistant_tokens=2)
    assert max(odds(pair, decoding, **PROCESSORS[1])) < FALSE_FAILURE


def test_control_drafts_taken_for_point_masses_of_a_rule_for_distributions_fail(pair, monkeypatch) -> None:
    """The reverse slip: argmax drafts that claim to have been drawn."""
    propose = ModelDrafter.propose

    def claim(self: ModelDrafter, ids: Tensor, *args: Any) -> DraftProposal:
        self.do_sample = False
        return propose(self, ids, *args)

    monkeypatch.setattr(ModelDrafter, "propose", claim)
    decoding = SpeculativeDecoding(pair[1], num_assistant_tokens=2)
    assert max(odds(pair, decoding)) < FALSE_FAILURE


def test_control_bild_with_a_positive_threshold_fails(pair) -> None:
    decoding = SpeculativeDecoding(
        pair[1], "bild", num_assistant_tokens=2, rollback_threshold=2.0, fallback_threshold=0.0
    )
    assert max(odds(pair, decoding)) < FALSE_FAILURE


@pytest.fixture
def enabled() -> Iterator[None]:
    with hf_specdec.enable():
        yield


@pytest.mark.parametrize(("strategy", "thresholds"), STRATEGIES, ids=["speculative", "bild"])
def test_set_seed_rules_every_draw(pair, enabled, strategy: str, thresholds: dict) -> None:
    ids, mask = prompt_batch(6, 0)
    arguments = {"assistant_model": pair[1], "generation_strategy": strategy, "do_sample": True, "max_new_tokens": 8}

    def run(seed: int) -> list:
        set_seed(seed)
        return pair[0].generate(input_ids=ids[:20], attention_mask=mask[:20], **arguments, **thresholds).tolist()

    assert run(3) == run(3)
    assert run(3) != run(4)
