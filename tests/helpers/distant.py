"""Simulates on the CPU a draft on another device."""

from __future__ import annotations

from typing import Any

import pytest

from hf_specdec.drafting import drafter_choice
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.other_device import OtherDeviceDrafter


def drafting_apart(monkeypatch: pytest.MonkeyPatch) -> list[DraftProposal]:
    """From now on drafts count as being on another device; what they propose is added to the returned list."""
    proposals: list[DraftProposal] = []
    propose = OtherDeviceDrafter.propose

    def proposed(self: OtherDeviceDrafter, *args: Any) -> DraftProposal:
        proposals.append(propose(self, *args))
        return proposals[-1]

    monkeypatch.setattr(drafter_choice, "is_on_other_device", lambda draft, target, processors: processors.portable)
    monkeypatch.setattr(OtherDeviceDrafter, "propose", proposed)
    return proposals
