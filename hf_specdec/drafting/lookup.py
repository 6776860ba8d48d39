"""Prompt lookup (Saxena 2023): find the last tokens earlier in the text, and draft what followed them there.

Lookup needs no forward pass. The copied tokens are verified as point masses, which every verification rule accepts as
input. The hybrid uses a draft model for rows where nothing matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_specdec.drafting.drafter import BaseDrafter, Drafter, DraftProposal, point_masses, usable
from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.relaxations import CertainWhereKept
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.rules.round_statistics import Round

# n-gram lengths, longest first. A match of one token is weak evidence, but a copy only costs a wider target pass. The
# hybrid requires longer matches, since its model can draft instead.
LOOKUP_SIZES = (3, 2, 1)
HYBRID_SIZES = (4, 3)


class NgramIndex:
    """The position after the latest occurrence of each n-gram in a growing text.

    Args:
        sizes: the n-gram lengths to index.
        tokens: the initial text.
    """

    def __init__(self, sizes: Sequence[int], tokens: Sequence[int] = ()) -> None:
        self.text: list[int] = []
        self._followed: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        known = len(self.text)
        self.text += tokens
        for size, followed in self._followed.items():
            # An n-gram is indexed once a token follows it, so those that end at `known - 1` or later are new.
            first = max(known - size, 0)
            grams = zip(*(self.text[first + offset :] for offset in range(size)), strict=False)
            followed.update(zip(grams, range(first + size, len(self.text)), strict=False))

    def find(self, last: tuple[int, ...]) -> int | None:
        """The position after the latest occurrence of an n-gram, whose length must be one of `sizes`."""
        return self._followed[len(last)].get(last)


class RowText:
    """One row's text, with lookup in the text and in the encoder's input.

    Args:
        sizes: n-gram lengths, longest first.
        source: the encoder's input tokens; empty for decoder-only models.
    """

    def __init__(self, sizes: Sequence[int], source: Sequence[int] = ()) -> None:
        self.sizes = sizes
        self.own = NgramIndex(sizes)
        self.source = NgramIndex(sizes, source)

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens that may come next; [] if nothing matches.

        For each n-gram length, the latest match in the row's text takes precedence over one in the source. A copy that
        reaches the end of the row's text repeats itself.
        """
        text = self.own.text
        for size in self.sizes:
            if size > len(text) or count == 0:
                continue
            last = tuple(text[-size:])
            place = self.own.find(last)
            if place is not None:
                copied = text[place : place + count]
                return (copied * (count // len(copied) + 1))[:count]
            place = self.source.find(last)
            if place is not None:
                return self.source.text[place : place + count]
        return []


class LookupDrafter(BaseDrafter):
    """Draft what followed a row's last tokens earlier in its text or in the encoder's input.

    Args:
        rule: limits the number of drafts. It can't stop them by probabilities, since copies have none.
        vocabulary: V, the size of the target's vocabulary. A copy ends before a token outside it, such as an image
            placeholder.
        processors: the caller's logits processors. A copy ends before a token that a `prefix_allowed_tokens_fn` among
            them forbids.
        sources: `[B, S]`, the encoder's input ids; None for decoder-only models.
        eos_tokens: a copy ends after one of these.
        sizes: n-gram lengths to match, longest first.
        max_length, rollback: see `BaseDrafter`.
    """

    def __init__(
        self,
        rule: StopRule,
        *,
        vocabulary: int,
        processors: HostProcessors | None = None,
        sources: Tensor | None = None,
        eos_tokens: frozenset[int] = frozenset(),
        sizes: Sequence[int] = LOOKUP_SIZES,
        max_length: int = 0,
        rollback: CertainWhereKept | None = None,
    ) -> None:
        super().__init__(rule, max_length=max_length, rollback=rollback)
        self.vocabulary = vocabulary
        self.processors = processors
        self.eos_tokens = eos_tokens
        self.sizes = sizes
        self._sources = None if sources is None else sources.tolist()
        self._rows: list[RowText] = []

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """Copy what followed the latest place where the text's last tokens occurred before."""
        return self.proposal(ids, lengths, self.find(ids, lengths, room))

    def proposal(self, ids: Tensor, lengths: Sequence[int], found: Sequence[Sequence[int]]) -> DraftProposal:
        """A proposal of the tokens that `find` returned, see `point_masses`."""
        return point_masses(ids, lengths, found, self.processors)

    def find(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> list[list[int]]:
        """Each row's copied tokens; [] if nothing matches or the row has no room. Arguments as in `propose`."""
        if not self._rows:
            sources = self._sources or [[]] * len(ids)
            self._rows = [RowText(self.sizes, source) for source in sources]
        live = [row for row, space in enumerate(room) if space > 0]
        if not live:
            return [[] for _ in room]
        first = min(len(self._rows[row].own.text) for row in live)
        fresh = ids[:, first : max(lengths)].tolist()
        found: list[list[int]] = [[] for _ in room]
        for row in live:
            text = self._rows[row]
            text.own.extend(fresh[row][len(text.own.text) - first : lengths[row] - first])
            copied = text.continuation(min(self.rule.limit, room[row]))
            copied = usable(copied, self.vocabulary, self.eos_tokens)
            if copied and self.processors:
                copied = copied[: self.processors.allowed(row, ids[row, : lengths[row]], copied)]
            found[row] = copied
        return found


class HybridDrafter(BaseDrafter):
    """Look up first, and draft with a model for rows where nothing matches.

    Args:
        lookup: the lookup drafter.
        model: any drafter with the same stop rule. It observes every round, even if it did not draft.
        max_length, rollback: see `BaseDrafter`.
    """

    def __init__(
        self, lookup: LookupDrafter, model: Drafter, *, max_length: int = 0, rollback: CertainWhereKept | None = None
    ) -> None:
        super().__init__(lookup.rule, max_length=max_length, rollback=rollback)
        self.lookup = lookup
        self.model = model

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """Copy where the text repeats itself, and draft with the model in the other rows.

        Where a row has the model's distributions, copies get one-hot ones.
        """
        found = self.lookup.find(ids, lengths, room)
        left = [0 if copied else space for copied, space in zip(found, room, strict=True)]
        modelled = self.model.propose(ids, lengths, left)
        copies = self.lookup.proposal(ids, lengths, found)
        if not any(found):
            return modelled
        if not any(modelled.lengths):
            return replace(copies, steps=modelled.steps)
        longest = max(*copies.lengths, *modelled.lengths)
        looked_up = torch.tensor([bool(copied) for copied in found], device=ids.device)
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
        """Learn from a finished round: the model updates the stop rule, which both share."""
        self.model.observe(finished)


def _widened(tokens: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
