"""Drafts that live apart and draft ahead where all is on the CPU, as they would under an accelerator."""

from __future__ import annotations

from typing import Any

import pytest

from hf_specdec import drafters
from hf_specdec.ahead_pays import AheadPays
from hf_specdec.distant_drafting import DistantDrafter
from hf_specdec.drafting import DraftProposal
from hf_specdec.stats import Round


class Always(AheadPays):
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
    propose, ahead = DistantDrafter.propose, DistantDrafter.ahead

    def proposed(self: DistantDrafter, *args: Any) -> DraftProposal:
        log.proposals.append(propose(self, *args))
        return log.proposals[-1]

    def drafted_ahead(self: DistantDrafter) -> int:
        log.passes_ahead.append(ahead(self))
        return log.passes_ahead[-1]

    monkeypatch.setattr(drafters, "drafts_apart", lambda draft, target, processors: processors.portable)
    monkeypatch.setattr(drafters, "drafts_ahead", lambda draft, target, rows: rows == 1)
    monkeypatch.setattr(drafters, "ahead_pays", lambda target, situation: Always())
    monkeypatch.setattr(DistantDrafter, "propose", proposed)
    monkeypatch.setattr(DistantDrafter, "ahead", drafted_ahead)
    return log
