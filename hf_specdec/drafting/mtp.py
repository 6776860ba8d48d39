"""Drafting with the multi-token-prediction layers that a target brings along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.mtp_runner import MtpRunner


class MtpDrafter(ModelDrafter):
    """As `ModelDrafter`, but a step is one of the target's layers, which read the target's hidden states.

    A round runs every layer at least once, also for shorter drafts. Longer drafts are made by the last layer.

    Args:
        runner: runs the layers.
    """

    def __init__(self, runner: MtpRunner, *arguments: Any, **named: Any) -> None:
        super().__init__(runner, *arguments, **named)
        self.layers = runner

    @property
    def states(self) -> HiddenStates:
        """What the runner reads of the target."""
        return self.layers.states

    def runners(self) -> list[Any]:
        """None: the layers' passes are not compiled."""
        return []

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """As `ModelDrafter.propose`, once the target has read the prompts."""
        before = self.layers.passes
        self.layers.begin(lengths)
        self._read = list(self.layers.read)
        proposal = super().propose(ids, lengths, room)
        self.layers.complete()
        return replace(proposal, steps=self.layers.passes - before)
