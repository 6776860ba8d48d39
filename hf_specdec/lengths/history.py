"""Times and chances learned from finished rounds, kept per target. Nothing here reads a clock."""

from __future__ import annotations

import threading
from bisect import bisect
from collections import deque
from collections.abc import Hashable, Iterable
from math import inf
from statistics import median_low

from hf_specdec.lengths.chances import DraftChances, of_copies
from hf_specdec.models.per_target import PerTarget
from hf_specdec.rules.round_statistics import Round

# Assumed until measured, in plain steps: the time that each further token adds to a pass, and that of a draft step.
PRIOR_SLOPE, PRIOR_RATIO = 0.04, 0.15
TIMES_KEPT = 5  # their median counts, so that a single stall has no effect
MOST_AT_FIRST = 1.5  # times the expected time: the first pass of a width may stall, or not be recorded yet
# The number of rounds with drafts after which a length that did not occur is forgotten, and plain decoding is timed
# again: otherwise one slow measurement would exclude it for good.
REMEMBERED = 64
# In plain steps: how much more look-ups may cost than copies save, and the credit for each round without a look-up.
LOOK_UP_CREDIT, LOOK_UP_SHARE = 4.0, 0.005


class Times:
    """Seconds by number of drafted tokens: medians of the latest times, and straight lines between and beyond them."""

    def __init__(self) -> None:
        self.medians: dict[int, float] = {}
        self._latest: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}  # when each number was timed last
        self._numbers: list[int] = []  # of drafted tokens, ascending, without 0

    def add(self, drafted: int, seconds: float, now: int, most: float = inf) -> None:
        """Add a time, after `now` rounds with drafts; the first one of a number counts as at most `most`."""
        if drafted not in self._latest:
            self._latest[drafted], seconds = deque(maxlen=TIMES_KEPT), min(seconds, most)
        self._latest[drafted].append(seconds)
        self.medians[drafted], self._seen[drafted] = median_low(self._latest[drafted]), now
        self.forget([n for n, last in self._seen.items() if n and now - last > REMEMBERED])

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget the times of some numbers of drafted tokens."""
        for old in numbers:
            for known in (self.medians, self._latest, self._seen):
                known.pop(old, None)
        self._numbers = sorted(n for n in self.medians if n)

    def at(self, drafted: int, slope: float, base: float = 0.0) -> float:
        """Seconds for `drafted` tokens; if unknown, by `base` for none and about `slope` for each further token."""
        numbers, medians = self._numbers, self.medians
        if drafted in medians:
            return medians[drafted]
        place = bisect(numbers, drafted)
        if not numbers or not drafted:
            return base + slope * drafted
        if place == len(numbers):
            first, last = numbers[0], numbers[-1]
            slope = max((medians[last] - medians[first] + slope) / (last - first + 1), 0.0)
            return medians[last] + slope * (drafted - last)
        low, least = (numbers[place - 1], medians[numbers[place - 1]]) if place else (0, base)
        return least + (medians[numbers[place]] - least) * (drafted - low) / (numbers[place] - low)


class LengthHistory:
    """What a target's calls in the same situation have learned.

    Attributes:
        accepted, copies: the chances of the model's tokens, and of copied ones.
        plain: seconds of a round without drafts.
        rounds: the number of timed rounds with drafts.
        since_plain: the number of rounds with drafts since the last one without.
        since_drafts: the number of rounds without drafts since the last one with.
        credit, look_up_credit: how much trials of drafts, and look-ups, may still cost, in plain steps.
        lock: guards all attributes against concurrent calls.
    """

    def __init__(self) -> None:
        self.accepted, self.copies = DraftChances(), of_copies()
        self.plain, self.rounds, self.since_plain, self.since_drafts = 1.0, 0, REMEMBERED, 0
        self.credit, self.look_up_credit = 1.0, LOOK_UP_CREDIT
        self.lock = threading.RLock()
        self._target, self._draft, self._catch_up = Times(), Times(), 0.0
        self._ratios: deque[float] = deque(maxlen=TIMES_KEPT)
        self._look_ups: deque[float] = deque(maxlen=TIMES_KEPT)
        self._prepared: LengthHistory | None = None

    def of_prepared_rounds(self) -> LengthHistory:
        """The history of rounds that are compiled or captured, whose times differ."""
        with self.lock:
            self._prepared = self._prepared or LengthHistory()
            return self._prepared

    def seconds(self, copied: int, steps: int) -> float:
        """The time of a round with up to `copied` copied tokens per row and `steps` draft steps."""
        drafting = self._draft.at(steps, self._ratio * self.plain)
        return drafting + self._target.at(max(copied, steps), PRIOR_SLOPE * self.plain, self.plain)

    def learn_first(self, finished: Round) -> None:
        """Learn the draft's time relative to the target's from the round that reads the prompts."""
        if finished.draft_steps and finished.verify_seconds > 0:
            self._ratios.append(finished.draft_seconds / finished.verify_seconds)

    def learn(self, finished: Round, steps: int = 0, unread: float = 0.0) -> None:
        """Learn from a later round with `steps` draft steps, before which the draft had skipped `unread` tokens."""
        drafted, medians = max(finished.width - 1, steps), self._target.medians
        self.since_plain, self.since_drafts = (self.since_plain + 1, 0) if drafted else (0, self.since_drafts + 1)
        if finished.seconds <= 0 or not finished.settled:  # transformers' own loop reports no times
            return
        most = MOST_AT_FIRST * self.seconds(drafted, 0) if medians else inf
        self.rounds += drafted > 0
        self._target.add(drafted, finished.seconds - finished.draft_seconds, self.rounds, most)
        self.plain = medians[min(medians)] / (1 + PRIOR_SLOPE * min(medians))
        if steps:
            self._catch_up = finished.catch_up_seconds or self._catch_up
            read = finished.catch_up_seconds or min(self._reading(unread) * self.plain, finished.draft_seconds / 2)
            self._draft.add(steps, finished.draft_seconds - read, self.rounds)
            self._ratios.append((finished.draft_seconds - read) / steps / self.plain)

    def begin_trial(self) -> None:
        """Forget the times of one drafted token, so that it is timed again."""
        for times in (self._target, self._draft):
            times.forget([1])

    def reconsider_copies(self) -> None:
        """After `REMEMBERED` rounds without drafts, forget their times: a slow one would exclude them for good."""
        if self.since_drafts >= REMEMBERED:
            self._target.forget([number for number in self._target.medians if number])
            self.since_drafts = 0

    def price(self, unread: float) -> float:
        """The cost of a trial of one drafted token that is rejected, in plain steps."""
        catch_up = self._catch_up / self.plain if unread > 1 else 0.0
        return self._ratio + PRIOR_SLOPE + max(catch_up, self._reading(unread))

    def _reading(self, unread: float) -> float:
        """The time that reading `unread` more tokens adds to a draft, in plain steps."""
        return unread * PRIOR_SLOPE * self._ratio

    @property
    def _ratio(self) -> float:
        """The time of a draft step, in plain steps."""
        return median_low(self._ratios) if self._ratios else PRIOR_RATIO

    def add_look_up(self, seconds: float) -> None:
        """Learn the time of a look-up."""
        self._look_ups.append(seconds)

    def pay_look_up(self, saved: float) -> None:
        """Charge a look-up to the credit, and add the seconds that copies are expected to save."""
        left = self.look_up_credit + (saved - (median_low(self._look_ups) if self._look_ups else 0.0)) / self.plain
        self.look_up_credit = min(max(left, -1.0), LOOK_UP_CREDIT)


_histories: PerTarget[LengthHistory] = PerTarget()


def length_history(target: object, situation: Hashable) -> LengthHistory:
    """The history shared by a target's calls in one situation."""
    return _histories.of(target, situation, LengthHistory)
