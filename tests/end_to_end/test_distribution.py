"""Sampling through `generate`: the distribution over whole outputs is the target's exact one.

Every comparison is a chi-square test at odds of 1e-6 of a false failure, and its seed is fixed, so that what
passed once passes again. The negative controls fail it by many orders of magnitude. Other ways to draft and to verify,
and strategies beyond their lossless limits, are in `test_output_distributions.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from helpers.distributions import FALSE_FAILURE, NEW_TOKENS, ROWS, chi_square_odds, exact, odds, prompt_batch, sample
from torch import Tensor
from transformers import set_seed

from hf_specdec import SpeculativeDecoding
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.rules import sampling

STRATEGIES = [
    ("speculative", {}),
    ("speculative", {"assistant_confidence_threshold": 0.5}),
    ("bild", {"rollback_threshold": 0.0, "fallback_threshold": 0.4}),
]
NAMES = ["speculative", "confidence", "bild"]
PROCESSORS = [
    {},
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.4, "top_p": 0.8},
    {"repetition_penalty": 1.7},
]


@pytest.mark.parametrize("settings", PROCESSORS, ids=str)
@pytest.mark.parametrize(("strategy", "thresholds"), STRATEGIES, ids=NAMES)
def test_outputs_are_distributed_as_the_target_s_own(toy_pair, strategy: str, thresholds: dict, settings: dict) -> None:
    decoding = SpeculativeDecoding(toy_pair[1], strategy, num_assistant_tokens=2, **thresholds)
    assert min(odds(toy_pair, decoding, **settings)) > FALSE_FAILURE
    assert decoding.stats is not None
    assert 0.1 < decoding.stats.acceptance_rate < 0.95


def test_one_row_and_returned_sequences_are_distributed_as_the_target_s_own(toy_pair) -> None:
    """`num_return_sequences` of one prompt, at another lookahead."""
    ids, mask = prompt_batch(4, 0)
    set_seed(12)
    outputs = (
        toy_pair[0]
        .generate(
            input_ids=ids[:1],
            attention_mask=mask[:1],
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            num_return_sequences=ROWS,
            custom_generate=SpeculativeDecoding(toy_pair[1], num_assistant_tokens=1),
        )[:, 4:]
        .tolist()
    )
    assert chi_square_odds(Counter(map(tuple, outputs)), exact(toy_pair[0], ids, mask, {}), ROWS) > FALSE_FAILURE


def test_the_yardstick_passes_plain_generate(toy_pair) -> None:
    """The enumeration agrees with what transformers itself samples."""
    assert min(odds(toy_pair, None, **PROCESSORS[1])) > FALSE_FAILURE


def test_control_the_draft_s_own_distribution_fails(toy_pair) -> None:
    ids, mask = prompt_batch(6, 0)
    set_seed(13)
    outputs = sample((toy_pair[1], toy_pair[1]), ids, mask, None).tolist()
    assert chi_square_odds(Counter(map(tuple, outputs)), exact(toy_pair[0], ids, mask, {}), ROWS) < FALSE_FAILURE


def test_control_a_draft_judged_by_unprocessed_scores_fails(toy_pair, monkeypatch) -> None:
    """Drawn from the processed distribution, handed out with the raw one: silently not lossless."""
    handed_out = ModelDrafter._choose

    def choose(self: ModelDrafter, ids: Tensor, lengths: Any, logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        _, tokens = handed_out(self, ids, lengths, logits, *rest)
        return sampling.probabilities(logits.float()), tokens

    monkeypatch.setattr(ModelDrafter, "_choose", choose)
    decoding = SpeculativeDecoding(toy_pair[1], num_assistant_tokens=2)
    assert max(odds(toy_pair, decoding, **PROCESSORS[1])) < FALSE_FAILURE


def test_control_drafts_taken_for_point_masses_of_a_rule_for_distributions_fail(toy_pair, monkeypatch) -> None:
    """The reverse slip: argmax drafts that claim to have been drawn."""
    propose = ModelDrafter.propose

    def claim(self: ModelDrafter, ids: Tensor, *args: Any) -> DraftProposal:
        self.do_sample = False
        return propose(self, ids, *args)

    monkeypatch.setattr(ModelDrafter, "propose", claim)
    decoding = SpeculativeDecoding(toy_pair[1], num_assistant_tokens=2)
    assert max(odds(toy_pair, decoding)) < FALSE_FAILURE


@pytest.mark.parametrize(("strategy", "thresholds"), STRATEGIES, ids=NAMES)
def test_set_seed_rules_every_draw(toy_pair, enabled, strategy: str, thresholds: dict) -> None:
    ids, mask = prompt_batch(6, 0)
    arguments = {
        "assistant_model": toy_pair[1],
        "generation_strategy": strategy,
        "do_sample": True,
        "max_new_tokens": 8,
    }

    def run(seed: int) -> list:
        set_seed(seed)
        return toy_pair[0].generate(input_ids=ids[:20], attention_mask=mask[:20], **arguments, **thresholds).tolist()

    assert run(3) == run(3)
    assert run(3) != run(4)
