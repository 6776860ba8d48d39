"""Simulates on the CPU a draft on another device that drafts ahead."""

from __future__ import annotations

from typing import Any

import pytest

from hf_specdec.drafting import drafter_choice
from hf_specdec.drafting.ahead_payoff import AheadPayoff
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.other_device import OtherDeviceDrafter
from hf_specdec.rules.round_statistics import Round


class Always(AheadPayoff):
    """Always ahead, whatever the times."""

    def observe(self, finished: Round) -> None:
        """Learn nothing."""


class Log:
    """What distant drafters proposed, and the rounds in which they drafted ahead."""

    def __init__(self) -> None:
        self.proposals: list[DraftProposal] = []
        self.passes_ahead: list[int] = []

    @property
    def kept(self) -> int:
        """Proposals that were drafted ahead."""
        return sum(proposal.steps == 0 and proposal.lengths[0] > 0 for proposal in self.proposals)


def drafting_ahead(monkeypatch: pytest.MonkeyPatch) -> Log:
    """From now on drafts live apart and draft ahead wherever an accelerator would let them."""
    log = Log()
    propose, ahead = OtherDeviceDrafter.propose, OtherDeviceDrafter.ahead

    def proposed(self: OtherDeviceDrafter, *args: Any) -> DraftProposal:
        log.proposals.append(propose(self, *args))
        return log.proposals[-1]

    def drafted_ahead(self: OtherDeviceDrafter) -> int:
        log.passes_ahead.append(ahead(self))
        return log.passes_ahead[-1]

    monkeypatch.setattr(drafter_choice, "is_on_other_device", lambda draft, target, processors: processors.portable)
    monkeypatch.setattr(drafter_choice, "can_draft_ahead", lambda draft, target, rows: rows == 1)
    monkeypatch.setattr(drafter_choice, "ahead_payoff", lambda target, situation: Always())
    monkeypatch.setattr(OtherDeviceDrafter, "propose", proposed)
    monkeypatch.setattr(OtherDeviceDrafter, "ahead", drafted_ahead)
    return log
