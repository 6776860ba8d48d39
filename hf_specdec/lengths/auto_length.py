"""Draft length that pays: chosen each round from what acceptance and passes have cost so far. No clocks here.

The rule knows finished rounds only, so that its choice never depends on the target's answer to a token in question.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Hashable, Sequence

from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.lengths.estimates import PRIOR_ACCEPTANCE, PassTimes, PositionRates
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.models.per_target import PerTarget
from hf_specdec.rules.statistics import Round

# Lengths of prepared rounds, each of which takes seconds to minutes to compile, or a graph of the device's memory.
PREPARED_LENGTHS = (0, 1, 2, 4, 8, MAX_ASSISTANT_TOKENS)
# One that is not ready has to promise so much more than the others.
UNPREPARED_PENALTY = 1.1
# A draft that gains less than this is not worth the risk of having measured wrongly.
MIN_SPEEDUP = 1.03
# A draft that gains more than this is not worth an early plain round to make sure.
CLEAR_SPEEDUP = 2.0
# What drafts may have lost for a probe to be made: so many plain steps, and this share of the time.
PROBE_ALLOWANCE, PROBE_SHARE = 1.25, 0.01
# In a round of its own, plain decoding is timed again after so many rounds with drafts, then four times as many, ….
FIRST_REFRESH, LAST_REFRESH = 16, 256


class LengthHistory:
    """What rounds have taught so far, over all calls in the same situation.

    Args:
        copies: drafts are copies and cost no steps.
        prepared: rounds are prepared ones, see `PassTimes`.

    Attributes:
        times: estimates of what passes take.
        accepted, drafted, steps: how far a row's accepted drafts get, the target's pass, and the draft's steps.
        elapsed: seconds of all rounds; a share of them may be lost by probes.
        balance: seconds that drafts have gained.
        probed: seconds that probes have lost.
        refresh: after so many rounds with drafts in a row plain decoding is timed again.
        prepared: what prepared rounds have taught, whose passes take other times; None before the first.
        lock: held while calls in several threads read or change any of this.
    """

    def __init__(self, *, copies: bool = False, prepared: bool = False) -> None:
        self.times = PassTimes(copies=copies, prepared=prepared)
        self.accepted = PositionRates(PRIOR_ACCEPTANCE)
        self.drafted = PositionRates(1.0)
        self.steps = PositionRates(1.0)
        self.elapsed = self.balance = self.probed = 0.0
        self.refresh = FIRST_REFRESH
        self.prepared: LengthHistory | None = None
        self.lock = threading.RLock()


_histories: PerTarget[LengthHistory] = PerTarget()


def length_history(target: object, situation: Hashable, *, copies: bool) -> LengthHistory:
    """What a target's calls in one situation have taught; see `LengthHistory`."""
    return _histories.of(target, situation, lambda: LengthHistory(copies=copies))


class AutoLength(StopRule):
    """Drafts as many tokens as maximise the expected tokens per second, none where drafting cannot pay.

    One length for all rows. A round of γ drafts yields 1 + Σ P(first i accepted) tokens a row and costs its draft
    steps and a target pass over γ + 1 tokens; both are estimated from the rounds so far. Where it does not draft,
    it probes when the probe's worst case fits into a budget: a fixed grant and a hundredth of the time spent, less
    what drafts have lost. What the draft has to catch up with is part of that cost. The first round drafts one
    token: the draft reads the prompt while the caller waits for the target to do so.

    Args:
        known: what earlier calls have taught; this one adds to it.

    Attributes:
        lengths: what it chooses from, in order, 0 first.
        ready: those of them that take no preparing; probes are made of these only.
    """

    def __init__(self, known: LengthHistory | None = None) -> None:
        super().__init__(1)
        self.known = known or LengthHistory()
        self.lengths: Sequence[int] = range(MAX_ASSISTANT_TOKENS + 1)
        self.ready: Container[int] = self.lengths
        self._rounds = 0
        self._unread = 0.0
        self._since_plain = 0
        self._probing = False

    def use_prepared(self, ready: Container[int]) -> None:
        """Before the first round: rounds are prepared ones, of the lengths of `PREPARED_LENGTHS`.

        Args:
            ready: lengths whose rounds are prepared by now; looked at in every round.
        """
        self.lengths, self.ready = PREPARED_LENGTHS, ready
        with self.known.lock:
            prepared = self.known.prepared or LengthHistory(prepared=True)
            self.known.prepared = prepared
        self.known = prepared
        with self.known.lock:
            best = self._best(self._rates())
        if best and best in ready:
            self.limit = best

    def observe(self, finished: Round) -> None:
        """See `StopRule.observe`: learn, then choose `limit` for the next round."""
        with self.known.lock:
            self._learn(finished)

    def _learn(self, finished: Round) -> None:
        live = [row for row, n in enumerate(finished.new_tokens) if n > 0]
        if not live:
            return
        self._rounds += 1
        known = self.known
        gained = sum(finished.new_tokens[row] for row in live) / len(live)
        if self._rounds == 1:
            known.times.first_round(finished)
        else:
            known.times.add(finished, self._unread)
            known.elapsed += finished.seconds
        if self.limit and self._rounds > 1:
            gain = gained * known.times.target(1) - finished.seconds
            known.balance += gain
            if self._probing:
                known.probed += max(-gain, 0.0)
        for positions in (known.accepted, known.drafted, known.steps):
            positions.fade()
        limits = [min(self.limit, space) for space in finished.room] or [self.limit] * len(finished.drafted)
        for row in live:
            accepted = finished.accepted[row]
            # Behind an end of text nothing was rejected.
            ended = finished.new_tokens[row] <= accepted
            known.accepted.add(accepted, accepted if ended else limits[row], 1.0 / len(live))
        known.drafted.add(finished.width - 1, max(limits), 1.0)
        known.steps.add(finished.draft_steps, max(limits), 1.0)
        self._unread = 0.0 if finished.draft_steps else self._unread + gained
        self._since_plain = 0 if self.limit == 0 else self._since_plain + 1
        self._choose()

    def _choose(self) -> None:
        known, rates = self.known, self._rates()
        best = self._best(rates)
        self._probing = False
        doubtful = not known.times.knows_plain and rates[best] < CLEAR_SPEEDUP * rates[0]
        if best and (doubtful or self._since_plain >= known.refresh):
            known.refresh = min(4 * known.refresh, LAST_REFRESH)
            best = 0
        elif best == 0 and known.times.knows_plain:
            best = self._probe()
            self._probing = best > 0
        self.limit = best

    def _best(self, rates: Sequence[float]) -> int:
        """The length of the highest rate, 0 where it gains too little; `rates` are those of 0 up to the longest draft.

        One that is not ready is the next behind the longest that is, at most.
        """
        # What a much longer one takes than those that were timed is anyone's guess.
        longest = max((at for at, n in enumerate(self.lengths) if n in self.ready), default=0)
        known = self.lengths[: longest + 2]
        best = max(known, key=lambda n: rates[n] if n in self.ready else rates[n] / UNPREPARED_PENALTY)
        return best if rates[best] >= MIN_SPEEDUP * rates[0] else 0

    def _rates(self) -> list[float]:
        """Expected tokens per second of a row, for rounds of 0 up to the longest draft."""
        tokens, drafts, steps = 1.0, 0.0, 0.0
        known = self.known
        rates = [1.0 / known.times.target(1)]
        for accepted, drafted, stepped in zip(
            known.accepted.reach(), known.drafted.reach(), known.steps.reach(), strict=True
        ):
            tokens, drafts, steps = tokens + accepted, drafts + drafted, steps + stepped
            rates.append(tokens / (known.times.drafting(steps) + known.times.target(1 + drafts)))
        return rates

    def _probe(self) -> int:
        """Length of a probe: cheap, and ready by now; 0 while its worst case does not fit into the budget."""
        known = self.known
        plain = known.times.target(1)
        lengths = [n for n in self.lengths if n and n in self.ready]
        cheap = [n for n in lengths if n <= 4 and self._loss(n) <= plain / 2]
        length = cheap[-1] if cheap else lengths[0]
        # What drafts lost after they had gained more is no reason to stop looking.
        lost = max(known.probed, -known.balance)
        budget = PROBE_ALLOWANCE * plain + PROBE_SHARE * known.elapsed - lost
        return length if self._loss(length) <= budget else 0

    def _loss(self, length: int) -> float:
        """Seconds lost by a round of so many drafts, none of them accepted."""
        times = self.known.times
        drafting = times.drafting(length) + times.catch_up(self._unread)
        return drafting + times.target(1 + length) - times.target(1)
