"""`num_assistant_tokens="auto"`: the length with the most expected tokens per second, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.lengths.history import REMEMBERED, LengthHistory
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.rules.round_statistics import Round

# Lengths of prepared rounds. They are few because each needs seconds to compile, or memory for its graph.
PREPARED_LENGTHS = (0, 1, 2, 4, 8, MAX_ASSISTANT_TOKENS)
# Lengths of other rounds: the first passes of each take longer, until they are recorded.
GENERAL_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, MAX_ASSISTANT_TOKENS)
# The factors by which an unprepared length must beat prepared ones, and drafting plain decoding: smaller gains may be
# noise in the times.
UNPREPARED_PENALTY, LEAST_GAIN = 1.12, 1.03
TRIAL_CREDIT, TRIAL_SHARE = 1.0, 0.01  # credit for trials, in plain steps: at most, and per plain round


class AutoLength(StopRule):
    """Choose the draft length with the most expected tokens per second, 0 if drafting is not worth its cost.

    All rows get the same length. A round with γ drafted tokens yields 1 + Σ P(first i accepted) tokens per row, and
    costs γ draft steps and a target pass over γ + 1 tokens. Chances and times come from finished rounds, so the choice
    never depends on whether the target accepts the tokens to be drafted.

    While the choice is 0, trials of one token test whether drafting has become worthwhile. A trial starts when the time
    that it may lose, with reading the tokens that the draft skipped, fits the credit: one plain step, plus 1% of the
    plain rounds.

    The first round uses the best length by earlier calls. Without any, or if drafting did not pay in them, it drafts
    one token, so that the draft reads the prompt as part of the prefill.

    Args:
        known: the history of earlier calls, to which this one adds.

    Attributes:
        lengths: the lengths to choose from, ascending from 0.
        is_ready: whether a length needs no further preparation.
    """

    serves_prepared_rounds = True
    longest = MAX_ASSISTANT_TOKENS
    lengths: Sequence[int]
    is_ready: Callable[[int], bool]

    def __init__(self, known: LengthHistory | None = None) -> None:
        super().__init__(1)
        self._general = known or LengthHistory()
        self._is_first, self._is_trial, self._rests = True, False, False
        self._rested, self._unread = 0, 0.0
        self.use_general()
        self._begin()

    def use_prepared(self, is_ready: Callable[[int], bool]) -> None:
        """Choose from `PREPARED_LENGTHS` from now on, by the history of prepared rounds."""
        self.lengths, self.is_ready, self.known = PREPARED_LENGTHS, is_ready, self._general.of_prepared_rounds()
        self._begin()

    def use_general(self) -> None:
        """Choose from `GENERAL_LENGTHS` again, by the history of general rounds."""
        self.lengths, self.is_ready, self.known = GENERAL_LENGTHS, lambda length: True, self._general

    def _begin(self) -> None:
        with self.known.lock:
            self.known.accepted.begin()
            best = self._best() if self.known.rounds else 0
        self.limit = best if best and self.is_ready(best) else 1

    def observe(self, finished: Round) -> None:
        """Learn from a round, then choose `limit` for the next one. Rounds with copies alone only teach times."""
        live = [row for row, n in enumerate(finished.new_tokens) if n > 0]
        if not live:
            return
        known, steps, gained = self.known, finished.draft_steps, sum(finished.new_tokens) / len(live)
        if steps and max(finished.room, default=self.limit) >= self.limit:
            steps = self.limit  # times count for the limit: other rules will end such drafts as early again
        with known.lock:
            if self._is_first:
                known.learn_first(finished)
            else:
                known.learn(finished, steps, self._unread)
            self._is_first, self._unread = False, 0.0 if steps else self._unread + gained
            if steps:
                self._learn_acceptance(finished, live)
                if self._is_trial:
                    known.credit = max(known.credit + gained - finished.seconds / known.plain, -TRIAL_CREDIT)
            if steps or not any(finished.drafted):
                self._choose()

    def _learn_acceptance(self, finished: Round, live: Sequence[int]) -> None:
        self.known.accepted.fade()
        for row in live:
            accepted, limit = finished.accepted[row], min([self.limit, *finished.room[row : row + 1]])
            # Tokens drafted after the end of a text were not rejected.
            drafted = accepted if finished.new_tokens[row] <= accepted else limit
            self.known.accepted.learn_draft(accepted, drafted, 1.0 / len(live))

    def _choose(self) -> None:
        known, self._is_trial = self.known, False
        if self._rests:
            self._rested += 1
            known.credit = min(known.credit, TRIAL_CREDIT + TRIAL_SHARE * self._rested) + TRIAL_SHARE
            shortest = next((n for n in self.lengths if n and self.is_ready(n)), 0)
            if shortest and known.price(self._unread) <= known.credit:
                known.begin_trial()
                self._rests, self._is_trial, self.limit = False, True, shortest
            return
        self.limit = self._best()
        self._rests = self.limit == 0
        if known.since_plain >= REMEMBERED:
            self.limit = 0

    def _best(self) -> int:
        """The length with the most expected tokens per second; 0 if none gains enough."""
        known, tokens, best = self.known, 1.0, 0
        most, choice = LEAST_GAIN / known.plain, choosable(self.lengths, self.is_ready)
        for length, reached in enumerate(islice(known.accepted.reach(), choice[-1]), start=1):
            tokens += reached
            if length in choice:
                rate = tokens / known.seconds(0, length) / (1.0 if self.is_ready(length) else UNPREPARED_PENALTY)
                best, most = (length, rate) if rate > most else (best, most)
        return best


def choosable(lengths: Sequence[int], is_ready: Callable[[int], bool]) -> Sequence[int]:
    """The lengths up to the next one after the longest ready one. Times of longer ones cannot be predicted."""
    longest = max((at for at, n in enumerate(lengths) if is_ready(n)), default=0)
    return lengths[: longest + 2]
