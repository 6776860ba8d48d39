"""Drafting with layers or drafts that read the target's hidden states: MTP layers, EAGLE-3 and DFlash drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.models.block_runner import BlockRunner
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.states_runner import StatesRunner


class OwnDrafter(ModelDrafter):
    """Draft as `ModelDrafter`, from the first round after the target has read the prompts.

    All multi-token-prediction layers run in every round, even for shorter drafts; the last one repeats for longer ones.
    A DFlash draft runs one pass per round, an EAGLE-3 draft one per token.

    Args:
        own: runs the layers or the draft.
    """

    def __init__(self, own: StatesRunner, *arguments: Any, **named: Any) -> None:
        super().__init__(own, *arguments, **named)
        self.own = own

    @property
    def states(self) -> HiddenStates:
        """The target's hidden states that the runner reads."""
        return self.own.states

    def runners(self) -> list[Any]:
        """No runners: its passes are neither compiled nor captured."""
        return []

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """As `ModelDrafter.propose`."""
        before = self.own.passes
        self.own.begin(lengths)
        self._read = list(self.own.read)
        proposal = super().propose(ids, lengths, room)
        self.own.complete()
        return replace(proposal, steps=self.own.passes - before)

    def _limit(self, lengths: Sequence[int], room: Sequence[int]) -> int:
        limit = super()._limit(lengths, room)
        return min(limit, self.own.most) if isinstance(self.own, BlockRunner) else limit
