"""Copies and a draft model in one call: each round and row takes what is expected to bring more tokens for its time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.drafting.drafter import BaseDrafter, Drafter, DraftProposal
from hf_specdec.drafting.suffix import SuffixDrafter
from hf_specdec.host.relaxations import CertainWhereKept
from hf_specdec.lengths.copy_chances import worthwhile
from hf_specdec.lengths.estimates import PRIOR_ACCEPTANCE, PRIOR_RATIO, PositionRates
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.rules.round_statistics import Round


class HybridDrafter(BaseDrafter):
    """Copy, draft with a model, or both, row by row.

    Args:
        copies: finds copies. Its `known` times, if any, are those that the rule measures.
        model: any drafter. It observes the rounds in which it drafted, or nothing was.
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
        self._accepted = PositionRates(PRIOR_ACCEPTANCE)
        self._begun = False
        self._copied: list[int] = []  # the rows that the last round copied in

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """Copies in some rows, drafts of the model in others.

        Where a row has the model's distributions, copies get one-hot ones.
        """
        copies = self.copies.find(ids, lengths, room)
        live = [row for row, space in enumerate(room) if space > 0]
        count, modelling = self._choose({row: copies[row].reach for row in live})
        found = [[] if row in modelling else copy.tokens[:count] for row, copy in enumerate(copies)]
        proposal = self.copies.proposal(ids, lengths, found)
        self._copied = [row for row, copied in enumerate(proposal.lengths) if copied]
        left = [space if row in modelling else 0 for row, space in enumerate(room)]
        return self._merged(proposal, self.model.propose(ids, lengths, left))

    def _choose(self, reaches: Mapping[int, Sequence[float]]) -> tuple[int, Collection[int]]:
        """How many tokens are copied at most, and the rows that the model drafts in: none, or where copies bring less.

        The first round is the model's, so that it reads the prompts while the target does.

        Args:
            reaches: for each row that goes on, the chances of its copied tokens.
        """
        begun, self._begun = self._begun, True
        count = worthwhile(list(reaches.values()), self.copies.cost)
        if not count or not begun:
            return 0, reaches
        steps = self._lengths.limit
        drafted = sum(islice(self._accepted.reach(), steps))
        copied = {row: sum(reach[:count]) for row, reach in reaches.items()}
        modelling = [row for row, tokens in copied.items() if tokens < drafted]
        rows, cost = len(reaches), self.copies.cost
        alone = (rows + sum(copied.values())) / cost(count + 1)
        beside = rows + sum(max(tokens, drafted) for tokens in copied.values())
        is_better = beside > alone * (self._drafting(steps) + cost(max(count, steps) + 1))
        return count, modelling if is_better else ()

    def _drafting(self, steps: int) -> float:
        """The time of a draft of the model."""
        known = self.copies.known
        if known is None or not known.elapsed:
            return PRIOR_RATIO * steps
        with known.lock:
            return known.times.drafting(steps)

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
        """Those of the model's drafter."""
        return self.model.runners()

    def observe(self, finished: Round) -> None:
        """Learn from a finished round; the model's rule learns nothing from rows with copies."""
        modelled = [row for row, count in enumerate(finished.drafted) if count and row not in self._copied]
        limit = min(self._lengths.limit, MAX_ASSISTANT_TOKENS)
        for row in modelled:
            self._accepted.add(min(finished.accepted[row], limit), limit, 1.0 / len(modelled))
        self._accepted.fade()
        if self._copied and not modelled:
            self.copies.observe(finished)
        else:
            tokens = [0 if row in self._copied else count for row, count in enumerate(finished.new_tokens)]
            self.model.observe(replace(finished, new_tokens=tuple(tokens)))


def _widened(tokens: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
