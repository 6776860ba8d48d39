"""Sampling with processors that keep state: whole outputs are distributed exactly as in plain `generate`.

The odds of a false failure are 1e-6 in each comparison, and seeds are fixed. The controls fail by many orders of
magnitude.
"""

from collections import Counter as Counts
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.distributions import FALSE_FAILURE, NEW_TOKENS, VOCABULARY, chi_square_odds, replayed, sampled
from helpers.models import llama, noisy
from helpers.stateful import PROCESSORS
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel
from transformers.generation import logits_process as host

from hf_specdec.in_order_decoding import InOrderDecoder

PROMPT = torch.tensor([[2, 3, 4, 2, 4, 3]])
ROWS, CALLS = 4, 60  # few, so that the rows of a call often agree, and enough for the controls
Make = Callable[[PreTrainedModel], LogitsProcessor]

MADE: dict[str, Make] = {
    **{name: lambda target, kind=kind: kind() for name, kind in PROCESSORS.items() if name != "budget"},
    "budget": lambda target: PROCESSORS["budget"](tokens=2, end=3),  # type: ignore[call-arg]
    "guidance": lambda target: host.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, target),
    "watermark": lambda target: host.SynthIDTextWatermarkLogitsProcessor(
        ngram_len=2,
        keys=[5, 9, 11],
        sampling_table_size=2**8,
        sampling_table_seed=0,
        context_history_size=8,
        device=torch.device("cpu"),
    ),
}


@pytest.fixture(scope="module")
def close_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target whose outputs can be enumerated. Of four rows that agree less often, one would reject at once."""
    target = llama(seed=5, vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    return target, noisy(target, 0.15)


def outputs(pair: tuple[PreTrainedModel, PreTrainedModel], make: Make, rows: int, **settings: Any) -> Tensor:
    """`[CALLS, rows, NEW_TOKENS]`."""
    return sampled(pair, PROMPT, make, rows, CALLS, **{"num_assistant_tokens": 2, **settings})


def odds(found: Tensor, expected: dict[tuple[int, ...], float]) -> float:
    counts = Counts(map(tuple, found.flatten(0, 1).tolist()))
    return chi_square_odds(counts, expected, found.shape[0] * found.shape[1])


VARIANTS: dict[str, dict[str, Any]] = {
    "suffix": {"drafter": "suffix"},
    "hybrid": {"drafter": "hybrid"},
    "block": {"verification": "block"},
    "bild": {"strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.4},
    "lenient": {"strategy": "lenient", "lenience": 1.0},
    "ensemble": {"strategy": "ensemble", "assistant_ensemble_weight": 1.0},
    "entropy": {"entropy_threshold": 0.5},
}


@pytest.mark.parametrize("name", MADE)
def test_outputs_are_distributed_as_the_target_s_own(close_pair, name: str) -> None:
    assert odds(outputs(close_pair, MADE[name], ROWS), replayed(close_pair[0], PROMPT, MADE[name])) > FALSE_FAILURE


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_to_draft_and_to_verify_is_lossless(close_pair, variant: str) -> None:
    name = "counter" if "drafter" in VARIANTS[variant] else "forkable automaton"
    found = outputs(close_pair, MADE[name], ROWS, **VARIANTS[variant])
    assert odds(found, replayed(close_pair[0], PROMPT, MADE[name])) > FALSE_FAILURE


def test_a_row_alone_is_distributed_as_the_target_s_own(close_pair) -> None:
    found = outputs(close_pair, MADE["automaton"], 1)
    assert odds(found, replayed(close_pair[0], PROMPT, MADE["automaton"])) > FALSE_FAILURE


def test_rows_that_wait_for_each_other_stay_independent(close_pair) -> None:
    """A row is cut short where another one rejects: its tokens must not tell."""
    found = outputs(close_pair, MADE["automaton"], ROWS)
    alone = replayed(close_pair[0], PROMPT, MADE["automaton"])
    for column in range(NEW_TOKENS):
        one = Counts[int]()
        for output, weight in alone.items():
            one[output[column]] += weight  # type: ignore[assignment]
        pairs = Counts(
            zip(found[:, ::2, column].flatten().tolist(), found[:, 1::2, column].flatten().tolist(), strict=True)
        )
        expected = {(a, b): one[a] * one[b] for a in one for b in one}
        assert chi_square_odds(pairs, expected, CALLS * ROWS // 2) > FALSE_FAILURE


def test_control_a_draft_that_always_stands_fails(close_pair, monkeypatch) -> None:
    judge = InOrderDecoder._judge

    def lax(self: InOrderDecoder, scores: Tensor, proposal: Any, drafted: Tensor, column: int) -> list[list[float]]:
        judged = judge(self, scores, proposal, drafted, column)
        drafts = proposal.tokens[:, column].tolist() if column < proposal.tokens.shape[1] else []
        return [[1, drafts[row], 1] if column < proposal.lengths[row] else one for row, one in enumerate(judged)]

    monkeypatch.setattr(InOrderDecoder, "_judge", lax)
    found = outputs(close_pair, MADE["counter"], ROWS)
    assert odds(found, replayed(close_pair[0], PROMPT, MADE["counter"])) < FALSE_FAILURE


def test_control_the_yardstick_tells_processors_apart(close_pair) -> None:
    found = outputs(close_pair, MADE["counter"], ROWS)
    assert odds(found, replayed(close_pair[0], PROMPT, MADE["automaton"])) < FALSE_FAILURE
