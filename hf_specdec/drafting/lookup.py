"""Drafting by prompt lookup: what followed the last tokens when they stood in the text before (Saxena 2023).

Copies cost no forward pass. They count as point masses, so that every verification rule takes them. The hybrid asks
a draft model where nothing matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_specdec.drafting.drafter import BaseDrafter, Drafter, DraftProposal, no_drafts, write_drafts
from hf_specdec.host.processors import BildRollback, HostProcessors
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.rules.statistics import Round

# Longest first. A single token is a weak hint, but a copy costs nothing but a wider target pass; where a model
# could draft instead, the hint has to be stronger.
LOOKUP_SIZES = (3, 2, 1)
HYBRID_SIZES = (4, 3)


class NgramIndex:
    """Where each n-gram of a growing text was last followed by a token.

    Args:
        sizes: n-gram lengths, the ones to try first in front.
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
            # An n-gram counts once a token follows it: those that end at `known - 1` and later are new.
            first = max(known - size, 0)
            grams = zip(*(self.text[first + offset :] for offset in range(size)), strict=False)
            followed.update(zip(grams, range(first + size, len(self.text)), strict=False))

    def find(self, last: tuple[int, ...]) -> int | None:
        """The place in the text after the latest occurrence of an n-gram of one of the sizes."""
        return self._followed[len(last)].get(last)


class RowText:
    """One row's text, looked up in itself and in the source that it was made from.

    Args:
        sizes: n-gram lengths, longest first.
        source: the encoder's input tokens; empty for decoder-only models.
    """

    def __init__(self, sizes: Sequence[int], source: Sequence[int] = ()) -> None:
        self.sizes = sizes
        self.own = NgramIndex(sizes)
        self.source = NgramIndex(sizes, source)

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens that may come next; [] where nothing matches.

        The row's own latest match goes before the source's. A copy that reaches the end of the row's text goes
        on with itself, as a repetition does.
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
    """Drafts what followed a row's last tokens before, in its own text or in its encoder's input.

    Args:
        rule: bounds the drafts; it is not asked for probabilities, since there are none.
        sources: `[B, S]`, the encoder's input ids; None for decoder-only models.
        vocabulary: V; a copy ends before a token beyond it (placeholders of images, other vocabularies).
        processors: the host's; a copy ends before a token that a `prefix_allowed_tokens_fn` among them forbids.
        eos_tokens: nothing is drafted after one of these.
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
        rollback: BildRollback | None = None,
    ) -> None:
        super().__init__(rule, max_length=max_length, rollback=rollback)
        self.vocabulary = vocabulary
        self.processors = processors
        self.eos_tokens = eos_tokens
        self.sizes = sizes
        self._sources = None if sources is None else sources.tolist()
        self._rows: list[RowText] = []

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """See `Drafter.propose`."""
        return self.proposal(ids, lengths, self.find(ids, lengths, room))

    def proposal(self, ids: Tensor, lengths: Sequence[int], found: Sequence[Sequence[int]]) -> DraftProposal:
        """What was found as point masses, written behind the texts in `ids` `[B, N]` if there are readers."""
        longest = max(map(len, found))
        if longest == 0:
            return no_drafts(ids)
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in found], device=ids.device)
        counts = tuple(map(len, found))
        if self.processors is not None and not self.processors.scores_only:
            write_drafts(ids, lengths, tokens, counts)
        return DraftProposal(tokens, counts)

    def find(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> list[list[int]]:
        """Each row's copied tokens; [] where nothing matches or nothing may be drafted. Arguments as `propose`."""
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
            copied = copied[: self._usable(copied)]
            if copied and self.processors:
                copied = copied[: self.processors.allowed(row, ids[row, : lengths[row]], copied)]
            found[row] = copied
        return found

    def _usable(self, tokens: Sequence[int]) -> int:
        """How many tokens the target knows, up to the first end of sequence."""
        for position, token in enumerate(tokens):
            if not 0 <= token < self.vocabulary:
                return position
            if token in self.eos_tokens:
                return position + 1
        return len(tokens)


class HybridDrafter(BaseDrafter):
    """Looks up first; rows where nothing matches are drafted by a model. Each row decides by its own text.

    Args:
        lookup: asked first.
        model: any drafter over the same stop rule; it is told of every round, drafting or not.
        max_length, rollback: see `BaseDrafter`.
    """

    def __init__(
        self, lookup: LookupDrafter, model: Drafter, *, max_length: int = 0, rollback: BildRollback | None = None
    ) -> None:
        super().__init__(lookup.rule, max_length=max_length, rollback=rollback)
        self.lookup = lookup
        self.model = model

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """See `Drafter.propose`; copies stand as one-hot distributions beside a model's."""
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
        """See `Drafter.retain`."""
        self.model.retain(rows)

    def observe(self, finished: Round) -> None:
        """See `Drafter.observe`; the rule is the model's, too."""
        self.model.observe(finished)


def _widened(tokens: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
