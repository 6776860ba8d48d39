"""Estimates that finished rounds give: how far drafts get, and what passes take. No clocks here."""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low

from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.rules.statistics import Round

# What is assumed until it is known: acceptance with its weight in rows, what each further token adds to a pass,
# a draft step in target steps.
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.75, 2.0
PRIOR_SLOPE = 0.03
PRIOR_RATIO = 0.15
# How many passes, a token's width off the mean, the assumed slope weighs.
SLOPE_PRIOR_WEIGHT = 1.0
# A round's weight in the estimates of acceptance shrinks by this with each later round, down to a floor at
# which a stale estimate still has a say.
DECAY, MIN_WEIGHT = 0.95, 3.0
# After so many rounds without it the time of a width counts half: passes may be recorded by now, and run faster.
HALF_LIFE = 16
# Times are medians of so many passes of one width: a machine that stalls once is not slow.
TIMES_KEPT = 5
LONG_PROMPT = 16


class PositionRates:
    """Shares of successes at draft positions 1, 2, …, each among those that got so far; old ones fade.

    A position borrows from the one before it until it has been seen often enough itself.

    Args:
        prior: the share assumed at first.
    """

    def __init__(self, prior: float) -> None:
        self._tried = [PRIOR_WEIGHT] + [0.0] * (MAX_ASSISTANT_TOKENS - 1)
        self._succeeded = [PRIOR_WEIGHT * prior] + [0.0] * (MAX_ASSISTANT_TOKENS - 1)

    def fade(self) -> None:
        """One round has passed."""
        for position, tried in enumerate(self._tried):
            if tried > MIN_WEIGHT:
                kept = max(DECAY, MIN_WEIGHT / tried)
                self._tried[position] *= kept
                self._succeeded[position] *= kept

    def add(self, succeeded: int, limit: int, weight: float) -> None:
        """A row got through its first `succeeded` positions and failed at the next, were it within `limit`."""
        for position in range(min(succeeded + 1, limit)):
            self._tried[position] += weight
            self._succeeded[position] += weight * (position < succeeded)

    def reach(self) -> list[float]:
        """`MAX_ASSISTANT_TOKENS` probabilities that position 1, 2, … is got through, all before it included."""
        share = self._succeeded[0] / self._tried[0]
        reached = [share]
        for tried, succeeded in zip(self._tried[1:], self._succeeded[1:], strict=True):
            share = (succeeded + PRIOR_WEIGHT * share) / (tried + PRIOR_WEIGHT)
            reached.append(reached[-1] * share)
        return reached


class PassTimes:
    """Seconds of a target pass by its width, of a draft step, and of a draft's reading of one more token.

    Of a batch's later passes, over the rows that have not ended: the median of a width follows within three of them,
    widths that do not occur any more keep the times of more rows.

    Args:
        copies: drafts are copies and cost no steps.
        prepared: passes are prepared ones: they always run in the same way, and a draft's first, which reads two tokens
            and begins a call, takes about as long as two others.
    """

    def __init__(self, *, copies: bool = False, prepared: bool = False) -> None:
        self._half_life = math.inf if prepared else HALF_LIFE
        self._beginning = 1 if prepared else 0
        self._by_width: dict[int, deque[float]] = {}
        self._medians: dict[int, tuple[float, float]] = {}  # how much the times known count, and their median
        self._rounds = 0
        self._seen: dict[int, int] = {}
        self._line = (0.0, 0.0, 0.0)
        self._steps: deque[float] = deque(maxlen=TIMES_KEPT)
        self._catch_ups: deque[float] = deque(maxlen=TIMES_KEPT)
        self._ratio = 0.0 if copies else PRIOR_RATIO
        self._reading: float | None = None

    @property
    def knows_plain(self) -> bool:
        """Whether a round without drafts has been timed; true as well where nothing is."""
        return not self._medians or 1 in self._medians

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
        if finished.width not in self._medians and self._medians:
            # The first pass of a width may be the one that stalls: wider ones bound it.
            wider = [seconds for width, (_, seconds) in self._medians.items() if width > finished.width]
            target = min(target, 1.5 * self.target(finished.width), *wider)
        self._by_width.setdefault(finished.width, deque(maxlen=TIMES_KEPT)).append(target)
        self._fit(finished.width)
        if finished.draft_steps:
            drafting, caught_up = finished.draft_seconds, finished.catch_up_seconds
            if caught_up:
                self._catch_ups.append(caught_up)
            elif unread:
                caught_up = min(self.reading(unread), drafting / 2)
            self._steps.append((drafting - caught_up) / (finished.draft_steps + self._beginning))

    def target(self, width: float) -> float:
        """Seconds of a round's target pass over `width` tokens a row.

        A line through the medians of all widths, and as far from it towards the width's own as that is known.
        """
        if not self._medians:
            return 1.0 + PRIOR_SLOPE * (width - 1)
        middle, level, slope = self._line
        line = max(level + slope * (width - middle), 0.1 * level)
        own = self._medians.get(width) if isinstance(width, int) else None
        return line if own is None else line + (own[1] - line) * own[0] / (own[0] + 1)

    def _fit(self, width: int) -> None:
        """The median of this width anew, and the line: (mean width, mean seconds, seconds a token)."""
        self._rounds += 1
        self._seen[width] = self._rounds
        for known_width, times in self._by_width.items():
            # A plain round is timed again now and then, so that its time always counts.
            age = 0 if known_width == 1 else self._rounds - self._seen[known_width]
            middle = median_low(times) if known_width == width else self._medians[known_width][1]
            self._medians[known_width] = (len(times) * 0.5 ** (age / self._half_life), middle)
        known = [(w, n, t) for w, (n, t) in self._medians.items()]
        total = sum(n for _, n, _ in known)
        middle = sum(w * n for w, n, _ in known) / total
        level = sum(t * n for _, n, t in known) / total
        spread = SLOPE_PRIOR_WEIGHT + sum(n * (w - middle) ** 2 for w, n, _ in known)
        rise = sum(n * (w - middle) * (t - level) for w, n, t in known) + SLOPE_PRIOR_WEIGHT * PRIOR_SLOPE * level
        # More tokens never take less time; where it looks so, it is noise.
        self._line = middle, level, max(rise / spread, 0.0)

    def step(self) -> float:
        """Seconds of a draft step."""
        return median_low(self._steps) if self._steps else self._ratio * self.target(1)

    def drafting(self, steps: float) -> float:
        """Seconds of a draft of so many steps."""
        return (steps + self._beginning) * self.step() if steps else 0.0

    def reading(self, unread: float) -> float:
        """Seconds that a draft's pass takes longer for so many more tokens."""
        return unread * (PRIOR_SLOPE * self.step() if self._reading is None else self._reading)

    def catch_up(self, unread: float) -> float:
        """Seconds that a draft takes to read so many tokens, in a pass of its own where it does so."""
        return max(self.reading(unread), median_low(self._catch_ups) if self._catch_ups else 0.0)
