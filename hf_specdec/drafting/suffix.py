"""Drafts without a model: find the longest suffix of the text that occurred before, and copy its usual continuation.

Look-ups need no forward pass. Copies are verified as point masses, which every verification rule supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from hf_specdec.drafting.drafter import (
    BaseDrafter,
    Copies,
    DraftProposal,
    PreparedDrafting,
    no_drafts,
    point_masses,
    usable,
)
from hf_specdec.drafting.suffix_automaton import Step, SuffixAutomaton
from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.relaxations import CertainWhereKept
from hf_specdec.lengths.auto_length import PREPARED_LENGTHS, UNPREPARED_PENALTY, choosable
from hf_specdec.lengths.choice import Choice, best_choice
from hf_specdec.lengths.history import LOOK_UP_SHARE, LengthHistory
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.rules.round_statistics import Round

# A copy ends where the probability that all of it is right falls below this.
LEAST_REACH = 0.02


class Copy(NamedTuple):
    """A possible continuation of a row's text.

    Args:
        tokens: the copied tokens.
        reach: for each token, the probability that it and all before it are right.
    """

    tokens: list[int]
    reach: list[float]


NO_COPY = Copy([], [])


@dataclass
class _Row:
    read: int = 0  # the number of its tokens in the automaton
    state: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)  # in the remembered answers, see `advance`
    foreseen: list[Step] = field(default_factory=list)


class SuffixDrafter(BaseDrafter):
    """Draft the most frequent continuation of the longest suffix of a row's text that occurred before.

    A draft is as long as its expected gain pays for a wider pass of the target. The probabilities are learned in every
    round, whether the copy was drafted or not.

    Args:
        rule: limits the number of drafts. It cannot stop them by probabilities, since copies have none.
        vocabulary: V, the size of the target's vocabulary. A copy ends before a token outside it, such as an image
            placeholder.
        processors: the caller's logits processors. A copy ends before a token that a `prefix_allowed_tokens_fn` among
            them forbids.
        sources: `[B, S]`, the encoder's input ids; None for decoder-only models.
        eos_tokens: a copy ends after one of these.
        remembered: earlier answers, which are looked up too.
        known: the acceptance of copies and the times of passes in earlier calls, to which this call adds; with None
            defaults are used, so that drafts depend on the text alone.
        max_length, rollback: see `BaseDrafter`.

    Attributes:
        measures: whether passes are timed.
        prepares: whether it drafts for prepared rounds.
    """

    def __init__(
        self,
        rule: StopRule,
        *,
        vocabulary: int,
        processors: HostProcessors | None = None,
        sources: Tensor | None = None,
        eos_tokens: frozenset[int] = frozenset(),
        remembered: Sequence[SuffixAutomaton] = (),
        known: LengthHistory | None = None,
        max_length: int = 0,
        rollback: CertainWhereKept | None = None,
    ) -> None:
        super().__init__(rule, max_length=max_length, rollback=rollback)
        self.vocabulary = vocabulary
        self.processors = processors
        self.eos_tokens = eos_tokens
        self.known = known or LengthHistory()
        self.measures = known is not None
        self._remembered = remembered
        self._chances = self.known.copies
        self._chances.begin()
        self._texts = SuffixAutomaton()
        for source in {} if sources is None else {tuple(row): None for row in sources.tolist()}:
            self._texts.extend(0, source)
        self._rows: list[_Row] = []
        self.prepares = False
        self._widths: Sequence[int] = range(1, rule.limit + 1)
        self._is_ready: Callable[[int], bool] = lambda width: True
        self._timed = False  # whether the round that reads the prompts is over
        self._looked = True  # whether this round's copies were looked up

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """Copy as many tokens as are worth verifying; all rows' drafts together pay for the width."""
        if self.rests():
            return no_drafts(ids)
        copies = self.find(ids, lengths, room)
        count = self.choice(copies, room).copied
        return self.proposal(ids, lengths, [copy.tokens[:count] for copy in copies])

    def choice(self, copies: Sequence[Copy], room: Sequence[int], drafted: float = 0.0, steps: int = 0) -> Choice:
        """The best choice for the rows that have room; other arguments as in `best_choice`."""
        reaches = {row: copies[row].reach[: self._widths[-1]] for row, space in enumerate(room) if space > 0}
        with self.known.lock:
            self.known.reconsider_copies()
            best = best_choice(reaches, drafted, steps, self._seconds, self._widths)
            self.known.pay_look_up(best.saved)
        return best

    def _seconds(self, copied: int, steps: int) -> float:
        return self.known.seconds(copied, steps) * (1.0 if self._is_ready(copied) else UNPREPARED_PENALTY)

    def use_prepared(self, is_ready: Callable[[int], bool]) -> None:
        """Choose for prepared rounds: among few widths, none much wider than the ready ones.

        Without times, drafts depend on the text alone, not on what earlier calls have prepared.
        """
        if not self.prepares:
            self.prepares, self.known = True, self.known.of_prepared_rounds()
            self._is_ready = is_ready if self.measures else self._is_ready
        widths = [n for n in PREPARED_LENGTHS if n < self.rule.limit] + [self.rule.limit]
        self._widths = choosable(widths, self._is_ready)[1:]

    def choose_prepared(
        self, ids: Tensor, lengths: Sequence[int], room: Sequence[int], is_ready: Callable[[int], bool]
    ) -> Copies:
        """As `propose`, for prepared rounds."""
        if self.rests():
            return Copies([()] * len(room), (), 0)
        self.use_prepared(is_ready)
        copies = self.find(ids, lengths, room)
        count = self.choice(copies, room).copied
        return Copies([copy.tokens[:count] for copy in copies], (), count)

    def for_prepared_rounds(self) -> PreparedDrafting:
        """Prepared rounds with copies."""
        return PreparedDrafting(self.rule, None, self.vocabulary, self.vocabulary, choose=self.choose_prepared)

    def proposal(self, ids: Tensor, lengths: Sequence[int], copies: Sequence[list[int]]) -> DraftProposal:
        """A proposal of each row's copied tokens, as far as constraints allow them; see `point_masses`."""
        if self.processors:
            allowed = self.processors.allowed
            copies = [
                copied[: allowed(row, ids[row, : lengths[row]], copied)] if copied else copied
                for row, copied in enumerate(copies)
            ]
        return point_masses(ids, lengths, copies, self.processors)

    def rests(self) -> bool:
        """Whether look-ups pause in this round, since copies have saved less time than finding them took.

        A two-hundredth of the time is still spent on look-ups. Call this once per round.
        """
        self._looked = not self.measures or self.known.look_up_credit > 0.0
        return not self._looked

    def find(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> list[Copy]:
        """Find a copy for each row; empty if the row has no room. Arguments as in `propose`."""
        self._rows = self._rows or [_Row(places=[(0, 0)] * len(self._remembered)) for _ in room]
        copies = [NO_COPY] * len(room)
        live = [row for row, space in enumerate(room) if space > 0]
        first = min((self._rows[row].read for row in live), default=0)
        fresh = ids[:, first : max(lengths)].tolist()
        for row in live:
            self._read(self._rows[row], fresh[row][self._rows[row].read - first : lengths[row] - first])
        for row in live:
            copy = self._foreseen(self._rows[row])
            tokens = usable(copy.tokens[: room[row]], self.vocabulary, self.eos_tokens)
            copies[row] = Copy(tokens, copy.reach[: len(tokens)])
        return copies

    def observe(self, finished: Round) -> None:
        """Learn the time of a pass. Acceptance is learned from the text."""
        if self.measures and self._timed:
            with self.known.lock:
                if self._looked:
                    self.known.learn(finished)
                else:
                    self.known.since_drafts += 1
        self.observe_look_up(finished)

    def observe_look_up(self, finished: Round) -> None:
        """Learn the time of look-ups in rounds without a model's draft; while look-ups pause, add to their credit."""
        if self.measures and self._timed:
            with self.known.lock:
                self.known.look_up_credit += 0.0 if self._looked else LOOK_UP_SHARE
                if self._looked and not finished.draft_steps:
                    self.known.add_look_up(finished.draft_seconds)
        self._timed = True

    def _read(self, row: _Row, tokens: Sequence[int]) -> None:
        """Append new tokens of a row, and learn whether they were predicted."""
        for step, token in zip(row.foreseen, tokens, strict=False):
            self._chances.learn(step.situation, step.token == token)
            if step.token != token:
                break
        row.read += len(tokens)
        row.state = self._texts.extend(row.state, tokens)
        for at, answers in enumerate(self._remembered):
            for token in tokens:
                row.places[at] = answers.advance(*row.places[at], token)

    def _foreseen(self, row: _Row) -> Copy:
        """The continuation with the most tokens expected to be right, from the texts and the remembered answers."""
        found: list[Iterator[Step]] = [self._texts.follow(row.state)]
        found += [answers.follow(*place) for answers, place in zip(self._remembered, row.places, strict=True)]
        best: tuple[list[Step], list[float]] = [], []
        for one in found:
            steps, reach, reached = [], [], 1.0
            for step in islice(one, self.rule.limit):
                reached *= self._chances[step.situation]
                steps.append(step)
                reach.append(reached)
                if reached < LEAST_REACH:
                    break
            if sum(reach) > sum(best[1]):
                best = steps, reach
        row.foreseen = best[0]
        return Copy([step.token for step in best[0]], best[1])
