"""A sampling round holds at most three tensors of `[B, γ+1, V]`, whatever the rule and the processors."""

from typing import Any

import pytest
import torch
from helpers.memory import LargeStorages
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.generation import MaxLengthCriteria

from hf_specdec.decoding import Decoder
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.host import processors as host_processors
from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.relaxations import BildRollback
from hf_specdec.host.transcript import Transcript
from hf_specdec.rules.verification import SAMPLING_RULES

ROWS, DRAFTED, VOCABULARY = 2, 7, 4096
COPY = ROWS * (DRAFTED + 1) * VOCABULARY * 4


class Logits:
    """A runner that returns random logits."""

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        return torch.randn(ROWS, count, VOCABULARY)


def peak(rule: str, processors: list[Any], *, points: bool = False, relaxation: BildRollback | None = None) -> float:
    """The most memory of a verification, in copies of `[B, γ+1, V]`, the drafts' probabilities included."""
    torch.manual_seed(0)
    criteria = StoppingCriteriaList([MaxLengthCriteria(99)])
    transcript = Transcript(torch.ones(ROWS, 3, dtype=torch.long), criteria, 0, spare=DRAFTED + 1)
    host = HostProcessors(LogitsProcessorList(processors))
    decoder = Decoder(Logits(), None, host, relaxation, SAMPLING_RULES[rule], True, torch.no_grad, None, True)  # type: ignore[arg-type]
    tokens = torch.randint(VOCABULARY, (ROWS, DRAFTED))
    with LargeStorages(COPY // 16) as memory:
        probs = None if points else torch.rand(ROWS, DRAFTED, VOCABULARY).div_(VOCABULARY / 2)
        proposal = DraftProposal(tokens, (DRAFTED, DRAFTED), probs)
        decoder._verify(transcript, tokens, proposal, [0, 1])
    return memory.peak / COPY


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("points", [False, True])
def test_three_copies_without_processors(rule: str, points: bool) -> None:
    assert 1.5 < peak(rule, [], points=points) <= 3.0


@pytest.mark.parametrize("rule", ["token", "block"])
def test_processors_work_in_pieces(rule: str, monkeypatch) -> None:
    warpers = [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]
    at_once = peak(rule, warpers)
    monkeypatch.setattr(host_processors, "CHUNK", VOCABULARY)
    assert peak(rule, warpers) <= 3.3 < at_once


def test_bild_holds_no_more() -> None:
    assert peak("token", [], points=True, relaxation=BildRollback(1.0, greedy=False)) <= 3.0
