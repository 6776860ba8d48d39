"""Copies and a draft model in one call: each round and row uses what is expected to yield more tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.drafting.drafter import BaseDrafter, Copies, Drafter, DraftProposal, PreparedDrafting
from hf_specdec.drafting.suffix import SuffixDrafter
from hf_specdec.host.relaxations import CertainWhereKept
from hf_specdec.lengths.choice import Choice
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.rules.round_statistics import Round


class HybridDrafter(BaseDrafter):
    """Copy, draft with a model, or both, row by row.

    Args:
        copies: finds copies. If it has measurements of earlier calls, the rule adds to these, too.
        model: any drafter. It observes the rounds in which it drafted, or in which nothing was drafted.
        rule: the model's stop rule.
        max_length, rollback: see `BaseDrafter`.
    """

    def __init__(
        self,
        copies: SuffixDrafter,
        model: Drafter,
        rule: StopRule,
        *,
        max_length: int = 0,
        rollback: CertainWhereKept | None = None,
    ) -> None:
        super().__init__(copies.rule, max_length=max_length, rollback=rollback)
        self.copies = copies
        self.model = model
        self._lengths = rule
        self._begun = False
        self._copied: list[int] = []  # the rows with copies in the last round

    @property
    def states(self) -> HiddenStates | None:
        """The hidden states that the model's drafter reads."""
        return self.model.states

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """Propose copies in some rows, drafts of the model in others.

        If any row has the model's distributions, copies get one-hot ones.
        """
        found, choice = self._chosen(ids, lengths, room)
        proposal = self.copies.proposal(ids, lengths, found)
        self._copied = [row for row, copied in enumerate(proposal.lengths) if copied]
        left = [space if row in choice.modelled else 0 for row, space in enumerate(room)]
        return self._merged(proposal, self.model.propose(ids, lengths, left))

    def choose_prepared(
        self, ids: Tensor, lengths: Sequence[int], room: Sequence[int], is_ready: Callable[[int], bool]
    ) -> Copies:
        """As `propose`, for prepared rounds, in which the model drafts."""
        self.copies.use_prepared(is_ready)
        found, choice = self._chosen(ids, lengths, room)
        self._copied = [row for row, copied in enumerate(found) if copied]
        return Copies(found, choice.modelled, choice.copied)

    def for_prepared_rounds(self) -> PreparedDrafting | None:
        """Prepared rounds of the model, with copies in some rounds."""
        drafting = self.model.for_prepared_rounds()
        return None if drafting is None else replace(drafting, choose=self.choose_prepared)

    def _chosen(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> tuple[list[list[int]], Choice]:
        """The copied tokens of each row, empty where the model drafts, and the choice.

        The first round uses the model, so that it reads the prompts along with the target.
        """
        rests, steps = self.copies.rests(), self._lengths.limit
        copies = [] if rests else self.copies.find(ids, lengths, room)
        if rests or not self._begun:
            going = [row for row, space in enumerate(room) if space > 0]
            modelled = going if steps or not self._begun else ()
            self._begun = True
            return [[]] * len(room), Choice(0, modelled)
        drafted = sum(islice(self.copies.known.accepted.reach(), steps))
        choice = self.copies.choice(copies, room, drafted, steps)
        return [
            [] if row in choice.modelled else copy.tokens[: choice.copied] for row, copy in enumerate(copies)
        ], choice

    def _merged(self, copies: DraftProposal, modelled: DraftProposal) -> DraftProposal:
        if not self._copied:
            return modelled
        if not any(modelled.lengths):
            return replace(copies, steps=modelled.steps)
        longest = max(*copies.lengths, *modelled.lengths)
        looked_up = torch.tensor([count > 0 for count in copies.lengths], device=copies.tokens.device)
        tokens = torch.where(
            looked_up.unsqueeze(1), _widened(copies.tokens, longest), _widened(modelled.tokens, longest)
        )
        probs = modelled.probs
        if probs is not None:
            probs = torch.nn.functional.pad(probs, (0, 0, 0, longest - probs.shape[1]))
            one_hot = torch.zeros_like(probs[looked_up]).scatter_(2, tokens[looked_up].unsqueeze(2), 1.0)
            probs[looked_up] = one_hot
        drafted = tuple(map(max, copies.lengths, modelled.lengths))
        return DraftProposal(tokens, drafted, probs, steps=modelled.steps)

    def retain(self, rows: Sequence[int]) -> None:
        """Draft for `rows` only from now on."""
        self.model.retain(rows)

    def runners(self) -> list[Any]:
        """The runners of the model's drafter."""
        return self.model.runners()

    def observe(self, finished: Round) -> None:
        """Learn from a finished round; the model's rule learns nothing from rows with copies."""
        self.copies.observe_look_up(finished)
        if self._copied and not finished.draft_steps:
            self._lengths.observe(finished)
            return
        tokens = [0 if row in self._copied else count for row, count in enumerate(finished.new_tokens)]
        self.model.observe(replace(finished, new_tokens=tuple(tokens)))
        if not self.copies.measures:  # otherwise the rule has learned it
            self._learn_acceptance(finished)

    def _learn_acceptance(self, finished: Round) -> None:
        accepted, limit = self.copies.known.accepted, min(self._lengths.limit, MAX_ASSISTANT_TOKENS)
        modelled = [row for row, count in enumerate(finished.drafted) if count and row not in self._copied]
        for row in modelled:
            accepted.learn_draft(finished.accepted[row], limit, 1.0 / len(modelled))


def _widened(tokens: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
