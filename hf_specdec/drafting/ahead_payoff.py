"""Decide from the times of finished rounds whether to draft ahead. Nothing here reads a clock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from statistics import fmean, median

from hf_specdec.models.per_target import PerTarget
from hf_specdec.rules.round_statistics import Round

STRETCH = 8  # consecutive rounds to compare with as many neighbouring ones
COMPARISONS = 5  # number of latest comparisons whose median decides
LONGEST_WAIT = 16  # most stretches between two trials of the slower mode
STALL = 3.0  # a round's time counts as at most this multiple of the median


class AheadPayoff:
    """Compare stretches of rounds with drafting ahead to neighbouring stretches without.

    Rounds are compared by their seconds, since the number of tokens per round does not depend on when its drafts were
    made. A stretch counts with its mean, because a round's gain depends on whether the guess was right. The median
    of several comparisons decides, because machines stall. The slower mode is tried again after 1, 2, 4, … stretches,
    up to `LONGEST_WAIT`, as long as it stays slower.

    Attributes:
        worth_it: whether to draft ahead in the next round; initially True.
    """

    def __init__(self) -> None:
        self.worth_it = True
        self._faster = True  # whether drafting ahead is the faster mode
        self._seconds: list[float] = []
        self._before: float | None = None  # mean seconds of the previous stretch, if it used the other mode
        self._ratios: deque[float] = deque(maxlen=COMPARISONS)
        self._wait, self._waited = 1, 0
        self._lock = threading.Lock()  # concurrent calls share this object

    def observe(self, finished: Round) -> None:
        """Learn from a finished round. Ignores rounds without drafts or times, and those that read a prompt."""
        drafted = max(finished.drafted)
        if drafted == 0 or finished.seconds <= 0 or finished.width > drafted + 1:
            return
        with self._lock:
            self._seconds.append(finished.seconds)
            # A stretch's first round doesn't count: whether it has drafts made ahead was decided in the round before.
            if len(self._seconds) > STRETCH:
                self._compare(self._seconds[1:])
                self._choose()

    def _compare(self, seconds: list[float]) -> None:
        """Compare a stretch to the previous one if that used the other mode."""
        most = STALL * median(seconds)
        mean = fmean(min(time, most) for time in seconds)
        if self._before is not None:
            self._ratios.append(mean / self._before if self.worth_it else self._before / mean)
            faster = median(self._ratios) <= 1.0
            if faster != self._faster:
                self._faster, self._wait = faster, 1
        self._before = mean

    def _choose(self) -> None:
        """Choose the mode of the next stretch."""
        self._waited += 1
        tries = self._waited >= self._wait
        if tries:
            self._wait, self._waited = min(2 * self._wait, LONGEST_WAIT), 0
        drafts_ahead = self._faster != tries
        if drafts_ahead == self.worth_it:
            # The mode stays the same, so all new rounds count: an old one takes the uncounted first place.
            self._seconds, self._before = self._seconds[-1:], None
        else:
            self.worth_it, self._seconds = drafts_ahead, []


_known: PerTarget[AheadPayoff] = PerTarget()


def ahead_payoff(target: object, situation: Hashable) -> AheadPayoff:
    """The comparisons that a target's calls in one situation share."""
    return _known.of(target, situation, AheadPayoff)
