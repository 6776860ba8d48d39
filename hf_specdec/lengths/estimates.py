"""Estimates of acceptance and pass times from finished rounds. Nothing here reads a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median_low

from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.rules.round_statistics import Round

# Values assumed before the first measurements.
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.75, 2.0  # the weight counts rows
PRIOR_SLOPE = 0.04  # each further token's share of a pass
PRIOR_RATIO = 0.15  # time of a draft step / time of a target step
# The weight of the assumed slope, in passes that are one token off the mean width.
SLOPE_PRIOR_WEIGHT = 0.7
# The weight of the assumption that two tokens cost one token more and nothing besides, in passes.
JUMP_PRIOR_WEIGHT = 0.2
# Each round multiplies the weight of earlier rounds in the acceptance estimates, down to a minimum total weight, so
# that a single new round can't dominate.
DECAY, MIN_WEIGHT = 0.97, 3.0
# Earlier calls count as much as this many rounds of a new one, whose text may be much harder to draft. With a larger
# weight, drafting would go on for too long where it no longer pays; with half of it, two unlucky rounds shorten the
# drafts of a text that is as easy as those before.
EARLIER_WEIGHT = 4.0
# The weight of a width's or a draft's times halves after this many rounds without it. By now it may be recorded, or no
# longer stalled, but what seems slow is hardly ever chosen again.
HALF_LIFE = 16
# Times are medians of this many passes of a width, so that one stall doesn't count.
TIMES_KEPT = 5
# What a prepared draft's first pass, which reads two tokens, takes beyond a step, in steps: assumed before drafts of
# two lengths were timed, and at most.
PRIOR_BEGINNING, MOST_BEGINNING = 0.5, 1.5


class PositionRates:
    """Success rates at draft positions 1, 2, …, each conditional on success at the positions before.

    Old rounds fade. A position with few observations borrows from the position before it.

    Args:
        prior: the rate assumed before the first observation.
    """

    def __init__(self, prior: float) -> None:
        self._tried = [PRIOR_WEIGHT] + [0.0] * (MAX_ASSISTANT_TOKENS - 1)
        self._succeeded = [PRIOR_WEIGHT * prior] + [0.0] * (MAX_ASSISTANT_TOKENS - 1)

    def fade(self, rounds: int = 1) -> None:
        """Reduce the weight of earlier rounds; call for each round, or for several at once."""
        for position, tried in enumerate(self._tried):
            if tried > MIN_WEIGHT:
                kept = max(DECAY**rounds, MIN_WEIGHT / tried)
                self._tried[position] *= kept
                self._succeeded[position] *= kept

    def weaken(self) -> None:
        """Reduce the weight of earlier calls, once per call, at least by half: what is not reached is forgotten."""
        for position, tried in enumerate(self._tried):
            kept = min(EARLIER_WEIGHT / tried, 0.5) if tried else 0.0
            self._tried[position] *= kept
            self._succeeded[position] *= kept

    def add(self, succeeded: int, limit: int, weight: float) -> None:
        """Record a row that succeeded at its first `succeeded` positions and, if within `limit`, failed at the next."""
        for position in range(min(succeeded + 1, limit)):
            self._tried[position] += weight
            self._succeeded[position] += weight * (position < succeeded)

    def reach(self) -> Iterator[float]:
        """`MAX_ASSISTANT_TOKENS` probabilities of success at all positions up to 1, 2, …."""
        reached = share = self._succeeded[0] / self._tried[0]
        yield reached
        for tried, succeeded in zip(self._tried[1:], self._succeeded[1:], strict=True):
            share = (succeeded + PRIOR_WEIGHT * share) / (tried + PRIOR_WEIGHT)
            reached *= share
            yield reached


class PassTimes:
    """Seconds of target passes by width, of draft steps, and of a draft reading one more token.

    Passes get faster as rows of a batch end. The median of a width follows within three passes; widths that no longer
    occur keep the times of more rows.

    Args:
        prepared: passes are compiled or captured. The first draft pass of a round, which reads two tokens, takes longer
            than a step.
    """

    def __init__(self, *, prepared: bool = False) -> None:
        self._prepared = prepared
        self._by_width: dict[int, deque[float]] = {}
        self._medians: dict[int, tuple[float, float]] = {}  # width -> (weight, median)
        self._rounds = 0
        self._seen: dict[int, int] = {}
        self._line: tuple[float, float, float, float] | None = None  # None since the last time
        self._drafts: dict[int, deque[float]] = {}  # steps of a draft, or 1 for a share of one -> seconds
        self._step: tuple[float, float] | None = None  # seconds of a step; beginning of a draft, in steps
        self._drafted = 0  # the last round with draft steps
        self._catch_ups: deque[float] = deque(maxlen=TIMES_KEPT)
        self._before: dict[bool, deque[float]] = {looked: deque(maxlen=TIMES_KEPT) for looked in (False, True)}
        self._ratio = PRIOR_RATIO

    @property
    def knows_plain(self) -> bool:
        """Whether a round without drafts has been timed. Also True before any round has been."""
        return not self._by_width or 1 in self._by_width

    def first_round(self, finished: Round) -> None:
        """Learn from the round that reads the prompts: draft time relative to the target."""
        if finished.draft_steps and finished.verify_seconds > 0:
            self._ratio = finished.draft_seconds / finished.verify_seconds

    def add(self, finished: Round, unread: float) -> None:
        """Learn from a round before which the draft had skipped `unread` tokens. Ignores rounds without times."""
        if finished.seconds <= 0:
            return
        width, target = finished.width, finished.seconds - finished.draft_seconds
        if width not in self._by_width and self._by_width:
            # The first pass of a width may be a stall, or not compiled yet, so wider passes bound it.
            bound = 1.5 * self.target(width)
            target = min(target, bound, *(seconds for wider, (_, seconds) in self._medians.items() if wider > width))
        self._by_width.setdefault(width, deque(maxlen=TIMES_KEPT)).append(target)
        self._rounds += 1
        self._seen[width] = self._rounds
        self._line = None
        if finished.draft_steps:
            drafting, caught_up = finished.draft_seconds, finished.catch_up_seconds
            if caught_up:
                self._catch_ups.append(caught_up)
            elif unread:
                caught_up = min(self.reading(unread), drafting / 2)
            self._drafted = self._rounds
            self._add_draft(finished.draft_steps, drafting - caught_up)

    def add_plain(self, seconds: Sequence[float]) -> None:
        """Learn from the seconds of rounds without drafts that follow others. Ignores rounds without times."""
        if seconds and 1 in self._by_width:
            self._by_width[1].extend(seconds[-TIMES_KEPT:])
            self._rounds += len(seconds)
            self._line = None

    def add_look_up(self, seconds: float, looked: bool) -> None:
        """Learn how long it took from a round's beginning to the target's pass, with a look-up or without one."""
        self._before[looked].append(seconds)

    def look_up(self) -> float:
        """Seconds of a look-up; before any round went without one, with what else precedes the target's pass."""
        without, with_one = (median_low(times) if times else 0.0 for times in self._before.values())
        return max(with_one - without, 0.0)

    def _add_draft(self, steps: int, seconds: float) -> None:
        """Lengths of prepared drafts are few, and each is timed; other drafts tell the time of a step."""
        length, timed = (steps, seconds) if self._prepared else (1, seconds / steps)
        self._drafts.setdefault(length, deque(maxlen=TIMES_KEPT)).append(timed)
        shortest, longest = min(self._drafts), max(self._drafts)
        first, last = median_low(self._drafts[shortest]), median_low(self._drafts[longest])
        if not self._prepared:
            self._step = last, 0.0
        else:
            # Nearby lengths, or a single one, hardly tell a step from the beginning.
            assumed = last / (longest + PRIOR_BEGINNING)
            step = (last - first + assumed) / (longest - shortest + 1)
            step = min(max(step, last / (longest + MOST_BEGINNING)), last / longest)
            self._step = step, last / step - longest

    def target(self, width: float) -> float:
        """Seconds of a target pass over `width` tokens per row.

        A fit to the medians of all widths, blended with the median of this width by its weight.
        """
        if not self._by_width:
            return 1.0 + PRIOR_SLOPE * (width - 1)
        level, single, jump, slope = self._line = self._line or self._fit()
        line = max(single + jump * min(width - 1, 1.0) + slope * (width - 1), 0.1 * level)
        own = self._medians.get(width) if isinstance(width, int) else None
        return line if own is None else line + (own[1] - line) * own[0] / (own[0] + 1)

    def _fit(self) -> tuple[float, float, float, float]:
        """Update the medians; the line: mean, one token, jump to two, each further token, in seconds.

        A single token often runs in another kernel, so that two cost much more and further ones little.
        """
        for width, times in self._by_width.items():
            # Plain rounds are timed again regularly, so their times keep full weight.
            weight = 1.0 if width == 1 else self._weight_of(self._seen[width])
            self._medians[width] = (len(times) * weight, median_low(times))
        known = [(w > 1, w - 1, n, t) for w, (n, t) in self._medians.items()]
        total = sum(n for _, _, n, _ in known)
        share = sum(n * several for several, _, n, _ in known) / total
        middle = sum(n * more for _, more, n, _ in known) / total
        level = sum(n * seconds for _, _, n, seconds in known) / total
        # The normal equations of a ridge regression on both features, which vary about their means.
        features = [(several - share, more - middle, n, seconds - level) for several, more, n, seconds in known]
        jumps = JUMP_PRIOR_WEIGHT + sum(n * x * x for x, _, n, _ in features)
        slopes = SLOPE_PRIOR_WEIGHT + sum(n * y * y for _, y, n, _ in features)
        both = sum(n * x * y for x, y, n, _ in features)
        jumped = sum(n * x * t for x, _, n, t in features)
        risen = sum(n * y * t for _, y, n, t in features) + SLOPE_PRIOR_WEIGHT * PRIOR_SLOPE * level
        # What is negative is noise: more tokens never take less time.
        jump = max((jumped * slopes - risen * both) / (jumps * slopes - both * both), 0.0)
        slope = (risen - jump * both) / slopes
        if slope < 0.0:
            jump, slope = max(jumped / jumps, 0.0), 0.0
        return level, level - jump * share - slope * middle, jump, slope

    def step(self) -> float:
        """Seconds of a draft step; after rounds without drafts nearer to the assumed time, if that is less."""
        assumed = self._ratio * self.target(1)
        if self._step is None:
            return assumed
        measured = self._step[0]
        return min(assumed, measured) + max(measured - assumed, 0.0) * self._weight_of(self._drafted)

    def draft_line(self) -> tuple[float, float]:
        """Seconds of a draft's beginning, and of each of its steps."""
        step = self.step()
        return step * (self._step[1] if self._step else PRIOR_BEGINNING * self._prepared), step

    def drafting(self, steps: int) -> float:
        """Seconds of a draft of `steps` steps."""
        if not steps:
            return 0.0
        beginning, step = self.draft_line()
        return beginning + steps * step

    def reading(self, unread: float) -> float:
        """Seconds that `unread` more tokens add to a draft pass."""
        return unread * PRIOR_SLOPE * self.step()

    def catch_up(self, unread: float) -> float:
        """Seconds that the draft takes to read `unread` tokens, in a separate pass if it has used one before."""
        measured = median_low(self._catch_ups) * self._weight_of(self._drafted) if self._catch_ups else 0.0
        return max(self.reading(unread), measured)

    def _weight_of(self, last: int) -> float:
        """The weight of a time that was last measured in round `last`, of 1 if that was the latest."""
        return 0.5 ** ((self._rounds - last) / HALF_LIFE)
