"""Whether drafting ahead pays, from the times of finished rounds. No clocks here."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from statistics import fmean, median

from hf_specdec.models.per_target import PerTarget
from hf_specdec.rules.statistics import Round

STRETCH = 8  # rounds that are compared with as many
COMPARISONS = 5  # the last of which decide
LONGEST_WAIT = 16  # stretches between two trials of the slower way
STALL = 3.0  # times the median: what a round counts at most


class AheadPayoff:
    """Compares stretches of rounds with drafting ahead to neighbouring ones without.

    By seconds of a round: how many tokens it yields does not depend on when its drafts were made. Means, since what a
    round gains hangs on whether the guess came true; the median of several comparisons, since machines stall. The
    slower way is tried for a stretch, then again after twice as many stretches, as long as it stays the slower one.

    Attributes:
        worth_it: whether to draft ahead in the next round; it starts with that.
    """

    def __init__(self) -> None:
        self.worth_it = True
        self._faster = True  # with it
        self._seconds: list[float] = []
        self._before: float | None = None  # mean of the stretch before, which went the other way
        self._ratios: deque[float] = deque(maxlen=COMPARISONS)
        self._wait, self._waited = 1, 0
        self._lock = threading.Lock()  # calls in several threads share it

    def observe(self, finished: Round) -> None:
        """Learn from a finished round; those without drafts or times, and those that read a prompt, teach nothing."""
        drafted = max(finished.drafted)
        if drafted == 0 or finished.seconds <= 0 or finished.width > drafted + 1:
            return
        with self._lock:
            self._seconds.append(finished.seconds)
            # A stretch's first round doesn't count: it starts with what the round before left it, drafts or none.
            if len(self._seconds) > STRETCH:
                self._compare(self._seconds[1:])
                self._choose()

    def _compare(self, seconds: list[float]) -> None:
        """Compare a stretch to the one before if that went the other way."""
        most = STALL * median(seconds)
        mean = fmean(min(time, most) for time in seconds)
        if self._before is not None:
            self._ratios.append(mean / self._before if self.worth_it else self._before / mean)
            faster = median(self._ratios) <= 1.0
            if faster != self._faster:
                self._faster, self._wait = faster, 1
        self._before = mean

    def _choose(self) -> None:
        """How the next stretch goes."""
        self._waited += 1
        tries = self._waited >= self._wait
        if tries:
            self._wait, self._waited = min(2 * self._wait, LONGEST_WAIT), 0
        way = self._faster != tries
        if way == self.worth_it:
            # Of a stretch that goes on as it was every round counts.
            self._seconds, self._before = self._seconds[-1:], None
        else:
            self.worth_it, self._seconds = way, []


_known: PerTarget[AheadPayoff] = PerTarget()


def ahead_payoff(target: object, situation: Hashable) -> AheadPayoff:
    """What a target's calls in one situation have taught."""
    return _known.of(target, situation, AheadPayoff)
