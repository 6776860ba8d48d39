"""`num_assistant_tokens="auto"`: choose each round's draft length from measured acceptance and pass times.

The rule only sees finished rounds, so its choice never depends on whether the target accepts the tokens in question.
Times are passed in; nothing here reads a clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import islice

from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.lengths.copy_chances import CopyChances
from hf_specdec.lengths.estimates import PRIOR_ACCEPTANCE, PassTimes, PositionRates
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.models.per_target import PerTarget
from hf_specdec.rules.round_statistics import Round

# Lengths of prepared rounds. They are few because each takes seconds to compile, or memory for its graph.
PREPARED_LENGTHS = (0, 1, 2, 4, 8, MAX_ASSISTANT_TOKENS)
# The factor by which a length that is not prepared yet must beat the prepared ones.
UNPREPARED_PENALTY = 1.1
# The factor by which drafting must beat plain decoding: below it, what seems to be a gain may be noise of the times.
LEAST_GAIN = 1.03
# The budget for probes, of a call and of all calls together: a number of plain steps, plus a share of the time so far.
PROBE_ALLOWANCE, PROBE_SHARE = 1.0, 0.01
REFRESH = 64  # rounds with drafts after which plain decoding is timed again
# After a while without drafts, this many plain rounds are only timed before the length is chosen again: learning from
# one takes a hundredth of a short round, and choosing a tenth.
PLAIN_ROUNDS = 32
# In plain steps: what look-ups may take beyond what copies save, for each round and at most. A look-up takes as long as
# a tenth of a plain step of a few million parameters.
LOOK_UP_SHARE, LOOK_UP_ALLOWANCE = 0.005, 4.0


class LengthHistory:
    """Estimates from the rounds of all calls in the same situation.

    Args:
        prepared: rounds are compiled or captured, see `PassTimes`.

    Attributes:
        times: estimated pass times.
        copies: the chances of copies.
        accepted, steps: for each draft position, how often a row's accepted drafts, and the draft's steps, reach it.
        elapsed: seconds of all rounds, a share of which probes may lose.
        probed: seconds lost by probes.
        since_plain: number of rounds with drafts since the last plain one.
        credit: what look-ups may still take, in plain steps.
        prepared: the estimates for prepared rounds, whose passes take different times; None before the first.
        lock: guards all attributes against concurrent calls.
    """

    def __init__(self, *, prepared: bool = False) -> None:
        self.times = PassTimes(prepared=prepared)
        self.copies = CopyChances()
        self.accepted = PositionRates(PRIOR_ACCEPTANCE)
        self.steps = PositionRates(1.0)
        self.elapsed = self.probed = 0.0
        self.since_plain = 0
        self.credit = LOOK_UP_ALLOWANCE
        self.prepared: LengthHistory | None = None
        self.lock = threading.RLock()

    def seconds(self, copied: int, steps: int) -> float:
        """The time of a round that copies up to `copied` tokens a row, and in which the model drafts in `steps`."""
        with self.lock:
            return self.times.drafting(steps) + self.times.target(1 + max(copied, steps))

    def pay_look_up(self, saved: float) -> None:
        """Take the time of a look-up off the credit, and add the seconds that its copies are expected to save."""
        with self.lock:
            found = self.credit + (saved - self.times.look_up()) / self.times.target(1)
            self.credit = min(max(found, -1.0), LOOK_UP_ALLOWANCE)

    def of_prepared_rounds(self) -> LengthHistory:
        """The estimates for prepared rounds."""
        with self.lock:
            self.prepared = self.prepared or LengthHistory(prepared=True)
            return self.prepared


_histories: PerTarget[LengthHistory] = PerTarget()


def length_history(target: object, situation: Hashable) -> LengthHistory:
    """The history that a target's calls in one situation share."""
    return _histories.of(target, situation, LengthHistory)


class AutoLength(StopRule):
    """Choose the draft length that maximises the expected tokens per second, 0 if drafting is not worth its cost.

    All rows get the same length. A round of γ drafts yields 1 + Σ P(first i accepted) tokens per row. It costs the
    draft steps and a target pass over γ + 1 tokens. Both are estimated from the rounds so far.

    While the chosen length is 0, single rounds with drafts, called probes, check whether drafting has become
    worthwhile. A probe runs if its worst case, which includes reading the tokens that the draft missed, fits two
    budgets, of this call and of all: a plain step and 1% of the time spent, less what probes have lost.

    The first round has the length that earlier calls support. If there were none, or drafting did not pay in them, it
    drafts one token, so that the draft reads the prompt as part of the prefill.

    Args:
        known: the history of earlier calls, which this call extends.

    Attributes:
        lengths: the lengths to choose from, ascending from 0.
        is_ready: whether a length needs no further preparation. Probes only use these.
    """

    serves_prepared_rounds = True

    def __init__(self, known: LengthHistory | None = None) -> None:
        super().__init__(1)
        self.known = self._general = known or LengthHistory()
        self.lengths: Sequence[int] = range(MAX_ASSISTANT_TOKENS + 1)
        self.is_ready: Callable[[int], bool] = lambda length: True
        self._rounds = 0
        self._unread = self._elapsed = self._probed = 0.0
        self._probing = False
        self._pause = 1  # rounds until the next choice, all but the last one plain
        self._waited: list[float] = []  # seconds of those that are over
        if self.known.elapsed:
            self._begin()

    @property
    def longest(self) -> int:
        """The longest draft that may be chosen in this call."""
        return self.lengths[-1]

    def use_prepared(self, is_ready: Callable[[int], bool]) -> None:
        """Choose from `PREPARED_LENGTHS` from now on, with what was learned in earlier prepared rounds."""
        self.lengths, self.is_ready = PREPARED_LENGTHS, is_ready
        self.known = self._general.of_prepared_rounds()
        self._begin()

    def _begin(self) -> None:
        """Choose the length of the first round, then let acceptance in this call outweigh that in earlier ones."""
        known = self.known
        with known.lock:
            best = self._best(self._rates())
            if known.elapsed:
                for positions in (known.accepted, known.steps):
                    positions.weaken()
        self.limit = best if best and self.is_ready(best) else 1

    def use_general(self) -> None:
        """Choose from all lengths again, with what was learned in general rounds."""
        self.lengths, self.is_ready = range(MAX_ASSISTANT_TOKENS + 1), lambda length: True
        self.known = self._general

    def observe(self, finished: Round) -> None:
        """Update the estimates, then choose `limit` for the next round.

        Nothing is learned from the last few plain rounds of a call, which no choice follows. Rounds of copies alone
        tell what passes take, but nothing about drafts.
        """
        if any(finished.drafted) and not finished.draft_steps:
            with self.known.lock:
                self.known.times.add(finished, 0.0)
                self.known.elapsed += finished.seconds
            self._elapsed += finished.seconds
            self._unread += max(finished.new_tokens)
            return
        if len(self._waited) + 1 < self._pause:
            self._waited.append(finished.seconds)
            return
        with self.known.lock:
            self._learn(finished)

    def _learn(self, finished: Round) -> None:
        live = [row for row, n in enumerate(finished.new_tokens) if n > 0]
        if not live:
            return
        self._rounds += 1
        known, waited = self.known, len(self._waited)
        gained = sum(finished.new_tokens[row] for row in live) / len(live)
        if self._rounds == 1:
            known.times.first_round(finished)
        else:
            known.times.add_plain(self._waited)
            known.times.add(finished, self._unread)
            seconds = sum(self._waited, finished.seconds)
            known.elapsed += seconds
            self._elapsed += seconds
        self._waited.clear()
        self._unread = 0.0 if finished.draft_steps else self._unread + waited + gained
        if self.limit == 0:
            known.since_plain = 0
        else:
            known.since_plain += 1
            if self._probing:
                lost = max(finished.seconds - gained * known.times.target(1), 0.0)
                self._probed += lost
                known.probed += lost
            self._learn_acceptance(finished, live)
        for positions in (known.accepted, known.steps):
            positions.fade(waited + 1)
        self._choose()

    def _learn_acceptance(self, finished: Round, live: Sequence[int]) -> None:
        known = self.known
        limits = [min(self.limit, space) for space in finished.room] or [self.limit] * len(finished.drafted)
        for row in live:
            accepted = finished.accepted[row]
            # Drafts after an end of text were not rejected.
            ended = finished.new_tokens[row] <= accepted
            known.accepted.add(accepted, accepted if ended else limits[row], 1.0 / len(live))
        known.steps.add(finished.draft_steps, max(limits), 1.0)

    def _choose(self) -> None:
        known, best = self.known, self._best(self._rates())
        self._probing, self._pause = False, 1
        if best and (not known.times.knows_plain or known.since_plain >= REFRESH):
            best = 0
        elif best == 0 and known.times.knows_plain:
            best = self._probe()
            self._probing = best > 0
            self._pause = 1 if best else min(1 + int(self._unread) // 2, PLAIN_ROUNDS)
        self.limit = best

    def _best(self, rates: Mapping[int, float]) -> int:
        """The length with the highest of the `rates`; 0 if it gains nothing."""
        best = max(rates, key=lambda n: rates[n] if self.is_ready(n) else rates[n] / UNPREPARED_PENALTY)
        return best if rates[best] > LEAST_GAIN * rates[0] else 0

    def _choice(self) -> Sequence[int]:
        """The lengths to choose from now: at most one step longer than the longest ready one.

        Times of much longer rounds than those that ran can't be extrapolated.
        """
        longest = max((at for at, n in enumerate(self.lengths) if self.is_ready(n)), default=0)
        return self.lengths[: longest + 2]

    def _rates(self) -> dict[int, float]:
        """Expected tokens per second of a row by draft length, of those that may be chosen."""
        tokens, steps, known, choice = 1.0, 0.0, self.known, self._choice()
        rates = {0: 1.0 / known.times.target(1)}
        beginning, step = known.times.draft_line()
        reached = zip(known.accepted.reach(), known.steps.reach(), strict=True)
        for length, (accepted, stepped) in enumerate(islice(reached, choice[-1]), start=1):
            tokens, steps = tokens + accepted, steps + stepped
            if length in choice:
                rates[length] = tokens / (beginning + steps * step + known.times.target(1 + steps))
        return rates

    def _probe(self) -> int:
        """The length of a probe, among the ready ones; 0 if its worst case exceeds the budget."""
        known = self.known
        plain = known.times.target(1)
        lengths = [n for n in self.lengths if n and self.is_ready(n)]
        if not lengths:
            return 0
        length = max((n for n in lengths if n <= 4 and self._loss(n) <= plain / 2), default=lengths[0])
        budget = min(PROBE_SHARE * known.elapsed - known.probed, PROBE_SHARE * self._elapsed - self._probed)
        budget += PROBE_ALLOWANCE * plain
        return length if self._loss(length) <= budget else 0

    def _loss(self, length: int) -> float:
        """Seconds lost by a round of `length` drafts if none is accepted."""
        times = self.known.times
        drafting = times.drafting(length) + times.catch_up(self._unread)
        return drafting + times.target(1 + length) - times.target(1)
