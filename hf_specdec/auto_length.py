"""Draft length that pays: chosen each round from what acceptance and passes have cost so far. No clocks here.

The rule knows finished rounds only, so that its choice never depends on the target's answer to a token in question.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Hashable, Sequence
from statistics import median_low
from typing import Any
from weakref import WeakKeyDictionary

from hf_specdec.config import MAX_ASSISTANT_TOKENS as MAX_DRAFT
from hf_specdec.draft_length import StopRule
from hf_specdec.stats import Round

# Lengths of prepared rounds, each of which takes seconds to minutes to compile, or a graph of the device's memory.
LADDER = (0, 1, 2, 4, 8, MAX_DRAFT)
# One that is not ready has to promise so much more than the others.
NEWCOMER = 1.1
# What is assumed until it is known: acceptance with its weight in rows, what each further token adds to a pass,
# a draft step in target steps.
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.75, 2.0
PRIOR_SLOPE = 0.03
PRIOR_RATIO = 0.15
# How many passes, a token's width off the mean, the assumed slope weighs.
LINE_WEIGHT = 1.0
# A round's weight in the estimates of acceptance shrinks by this with each later round, down to a floor at
# which a stale estimate still has a say.
MEMORY, FLOOR = 0.95, 3.0
# Times are medians of so many passes of one width: a machine that stalls once is not slow.
PASSES = 5
# A draft that gains less than this is not worth the risk of having measured wrongly.
MARGIN = 1.03
# A draft that gains more than this is not worth an early plain round to make sure.
CLEAR = 2.0
# What drafts may have lost for a probe to be made: so many plain steps, and this share of the time.
GRANT, SHARE = 1.25, 0.01
# In a round of its own, plain decoding is timed again after so many rounds with drafts, then four times as many, ….
FIRST_REFRESH, LAST_REFRESH = 16, 256
LONG_PROMPT = 16
KEPT_SITUATIONS = 16  # of a target


class Positions:
    """Shares of successes at draft positions 1, 2, …, each among those that got so far; old ones fade.

    A position borrows from the one before it until it has been seen often enough itself.

    Args:
        prior: the share assumed at first.
    """

    def __init__(self, prior: float) -> None:
        self._tried = [PRIOR_WEIGHT] + [0.0] * (MAX_DRAFT - 1)
        self._succeeded = [PRIOR_WEIGHT * prior] + [0.0] * (MAX_DRAFT - 1)

    def fade(self) -> None:
        """One round has passed."""
        for position, tried in enumerate(self._tried):
            if tried > FLOOR:
                kept = max(MEMORY, FLOOR / tried)
                self._tried[position] *= kept
                self._succeeded[position] *= kept

    def add(self, succeeded: int, limit: int, weight: float) -> None:
        """A row got through its first `succeeded` positions and failed at the next, were it within `limit`."""
        for position in range(min(succeeded + 1, limit)):
            self._tried[position] += weight
            self._succeeded[position] += weight * (position < succeeded)

    def reach(self) -> list[float]:
        """`MAX_DRAFT` probabilities that position 1, 2, … is got through, all before it included."""
        share = self._succeeded[0] / self._tried[0]
        reached = [share]
        for tried, succeeded in zip(self._tried[1:], self._succeeded[1:], strict=True):
            share = (succeeded + PRIOR_WEIGHT * share) / (tried + PRIOR_WEIGHT)
            reached.append(reached[-1] * share)
        return reached


class Times:
    """Seconds of a target pass by its width, of a draft step, and of a draft's reading of one more token.

    Args:
        copies: drafts are copies and cost no steps.
    """

    def __init__(self, *, copies: bool = False) -> None:
        self._by_width: dict[int, deque[float]] = {}
        self._steps: deque[float] = deque(maxlen=PASSES)
        self._catch_ups: deque[float] = deque(maxlen=PASSES)
        self._ratio = 0.0 if copies else PRIOR_RATIO
        self._reading: float | None = None

    @property
    def knows_plain(self) -> bool:
        """Whether a round without drafts has been timed; true as well where nothing is."""
        return not self._by_width or 1 in self._by_width

    def first_round(self, finished: Round) -> None:
        """The first round reads the prompts: it tells how draft and target compare, and what reading costs."""
        if finished.draft_steps and finished.verify_seconds > 0:
            self._ratio = finished.draft_seconds / finished.verify_seconds
            if finished.width >= LONG_PROMPT:
                self._reading = finished.draft_seconds / finished.width

    def add(self, finished: Round, unread: float) -> None:
        """Learn from a round whose draft had left `unread` tokens aside; rounds without times are passed over."""
        if finished.seconds <= 0:
            return
        target = finished.seconds - finished.draft_seconds
        if finished.width not in self._by_width and self._by_width:
            # The first pass of a width may be the one that stalls: wider ones bound it.
            wider = [median_low(times) for width, times in self._by_width.items() if width > finished.width]
            target = min(target, 1.5 * self.target(finished.width), *wider)
        self._by_width.setdefault(finished.width, deque(maxlen=PASSES)).append(target)
        if finished.draft_steps:
            drafting, caught_up = finished.draft_seconds, finished.catch_up_seconds
            if caught_up:
                self._catch_ups.append(caught_up)
            elif unread:
                caught_up = min(self.reading(unread), drafting / 2)
            self._steps.append((drafting - caught_up) / finished.draft_steps)

    def target(self, width: float) -> float:
        """Seconds of a round's target pass over `width` tokens a row.

        A line through the medians of all widths, and as far from it towards the width's own as that is known.
        """
        if not self._by_width:
            return 1.0 + PRIOR_SLOPE * (width - 1)
        known = [(w, len(times), median_low(times)) for w, times in self._by_width.items()]
        total = sum(n for _, n, _ in known)
        middle = sum(w * n for w, n, _ in known) / total
        level = sum(t * n for _, n, t in known) / total
        spread = LINE_WEIGHT + sum(n * (w - middle) ** 2 for w, n, _ in known)
        rise = sum(n * (w - middle) * (t - level) for w, n, t in known) + LINE_WEIGHT * PRIOR_SLOPE * level
        # More tokens never take less time; where it looks so, it is noise.
        slope = max(rise / spread, 0.0)
        line = max(level + slope * (width - middle), 0.1 * level)
        own = self._by_width.get(width) if isinstance(width, int) else None
        return line if own is None else line + (median_low(own) - line) * len(own) / (len(own) + 1)

    def step(self) -> float:
        """Seconds of a draft step."""
        return median_low(self._steps) if self._steps else self._ratio * self.target(1)

    def reading(self, unread: float) -> float:
        """Seconds that a draft's pass takes longer for so many more tokens."""
        return unread * (PRIOR_SLOPE * self.step() if self._reading is None else self._reading)

    def catch_up(self, unread: float) -> float:
        """Seconds that a draft takes to read so many tokens, in a pass of its own where it does so."""
        return max(self.reading(unread), median_low(self._catch_ups) if self._catch_ups else 0.0)


class Experience:
    """What rounds have taught so far, over all calls in the same situation.

    Args:
        copies: drafts are copies and cost no steps.

    Attributes:
        times, accepted, drafted: estimates of what passes take and of how far drafts get.
        elapsed: seconds of all rounds; a share of them may be lost by probes.
        balance: seconds that drafts have gained.
        probed: seconds that probes have lost.
        refresh: after so many rounds with drafts in a row plain decoding is timed again.
        prepared: what prepared rounds have taught, whose passes take other times; None before the first.
    """

    def __init__(self, *, copies: bool = False) -> None:
        self.times = Times(copies=copies)
        self.accepted = Positions(PRIOR_ACCEPTANCE)
        self.drafted = Positions(1.0)
        self.elapsed = self.balance = self.probed = 0.0
        self.refresh = FIRST_REFRESH
        self.prepared: Experience | None = None


_experiences: WeakKeyDictionary[Any, OrderedDict[Hashable, Experience]] = WeakKeyDictionary()


def experience(target: object, situation: Hashable, *, copies: bool) -> Experience:
    """The experience of a target's calls in one situation, which goes with the target; a fresh one at first."""
    known = _experiences.setdefault(target, OrderedDict())
    if situation not in known:
        known[situation] = Experience(copies=copies)
    known.move_to_end(situation)
    while len(known) > KEPT_SITUATIONS:
        known.popitem(last=False)
    return known[situation]


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

    def __init__(self, known: Experience | None = None) -> None:
        super().__init__(1)
        self.known = known or Experience()
        self.lengths: Sequence[int] = range(MAX_DRAFT + 1)
        self.ready: Container[int] = self.lengths
        self._takes_all_steps = False
        self._rounds = 0
        self._live = 1
        self._unread = 0.0
        self._since_plain = 0
        self._probing = False

    def use_prepared(self, ready: Container[int]) -> None:
        """Before the first round: rounds are prepared ones, of the lengths of `LADDER`, and take all of their steps.

        Args:
            ready: lengths whose rounds are prepared by now; looked at in every round.
        """
        self.lengths, self.ready, self._takes_all_steps = LADDER, ready, True
        prepared = self.known.prepared or Experience()
        self.known.prepared = prepared
        self.known = prepared
        best = self._best(self._rates())
        if best and best in ready:
            self.limit = best

    def observe(self, finished: Round) -> None:
        """See `StopRule.observe`: learn, then choose `limit` for the next round."""
        live = [row for row, n in enumerate(finished.new_tokens) if n > 0]
        if not live:
            return
        self._rounds += 1
        self._live = len(live)
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
        for positions, counts in ((known.accepted, finished.accepted), (known.drafted, finished.drafted)):
            positions.fade()
            for row in live:
                positions.add(counts[row], self.limit, 1.0 / len(live))
        self._unread = 0.0 if finished.draft_steps else self._unread + gained
        self._since_plain = 0 if self.limit == 0 else self._since_plain + 1
        self._choose()

    def _choose(self) -> None:
        known, rates = self.known, self._rates()
        best = self._best(rates)
        self._probing = False
        doubtful = not known.times.knows_plain and rates[best] < CLEAR * rates[0]
        if best and (doubtful or self._since_plain >= known.refresh):
            known.refresh = min(4 * known.refresh, LAST_REFRESH)
            best = 0
        elif best == 0 and known.times.knows_plain:
            best = self._probe()
            self._probing = best > 0
        self.limit = best

    def _best(self, rates: Sequence[float]) -> int:
        """The length of the highest rate, 0 where it gains too little; `rates` are those of 0 to `MAX_DRAFT` drafts."""
        best = max(self.lengths, key=lambda n: rates[n] if n in self.ready else rates[n] / NEWCOMER)
        return best if rates[best] >= MARGIN * rates[0] else 0

    def _rates(self) -> list[float]:
        """Expected tokens per second of a row, for rounds of 0 to `MAX_DRAFT` drafts."""
        tokens, drafts, steps = 1.0, 0.0, 0.0
        times = self.known.times
        rates = [1.0 / times.target(1)]
        drafted = [1.0] * MAX_DRAFT
        if not self._takes_all_steps:
            # A round goes on as long as any row drafts.
            drafted = [1.0 - (1.0 - reached) ** self._live for reached in self.known.drafted.reach()]
        for position, accepted in enumerate(self.known.accepted.reach()):
            # The step that finds that a draft has to stop is paid for as well.
            steps += drafted[position - 1] if position else 1.0
            drafts += drafted[position]
            tokens += accepted
            rates.append(tokens / (steps * times.step() + times.target(1 + drafts)))
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
        budget = GRANT * plain + SHARE * known.elapsed - lost
        return length if self._loss(length) <= budget else 0

    def _loss(self, length: int) -> float:
        """Seconds lost by a round of so many drafts, none of them accepted."""
        times = self.known.times
        drafting = length * times.step() + times.catch_up(self._unread)
        return drafting + times.target(1 + length) - times.target(1)
