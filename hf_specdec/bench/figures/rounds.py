"""What rounds drafted and accepted, and where their time went, from the calls that a result holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hf_specdec.bench.running.timed_call import Call

# (drafted, accepted, new tokens, overlap) of a row in a round
RowRound = tuple[int, int, int, "float | None"]


@dataclass(frozen=True)
class Position:
    """A position of drafts: how many rounds reached it, and in how many of these its token was accepted.

    Args:
        low, high: the share's 95% interval (Wilson's).
    """

    reached: int
    accepted: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Accepted / reached."""
        return self.accepted / self.reached


def row_rounds(calls: Iterable[Call]) -> Iterator[RowRound]:
    """Every row of every round, except rounds after the row's end."""
    for call in calls:
        rounds = call.rounds
        for number, new in enumerate(rounds.new_tokens if rounds else ()):
            assert rounds is not None
            for row, count in enumerate(new):
                if count > 0:
                    overlap = None if rounds.overlap is None else rounds.overlap[number][row]
                    yield rounds.drafted[number][row], rounds.accepted[number][row], count, overlap


def acceptance_rate(calls: Iterable[Call]) -> float | None:
    """Accepted drafted tokens / drafted tokens; None where nothing was drafted."""
    listed = list(row_rounds(calls))
    drafted = sum(drafted for drafted, *_ in listed)
    return sum(accepted for _, accepted, *_ in listed) / drafted if drafted else None


def tokens_per_round(calls: Iterable[Call]) -> float | None:
    """τ: new tokens / target verification passes, the target's own token included; None for plain generate()."""
    listed = list(row_rounds(calls))
    return sum(new for _, _, new, _ in listed) / len(listed) if listed else None


def alpha(calls: Iterable[Call]) -> float | None:
    """α (Leviathan et al. 2023): mean over the drafted positions reached of the overlap of both distributions.

    Reached are the accepted positions and the first that failed in each round. None for a method that doesn't
    report the overlap (transformers' own in sampling), and if nothing was drafted.
    """
    listed = list(row_rounds(calls))
    reached = sum(min(accepted + 1, drafted) for drafted, accepted, *_ in listed)
    overlaps = [overlap for *_, overlap in listed if overlap is not None]
    if not reached or len(overlaps) < len(listed):
        return None
    return sum(overlaps) / reached


def acceptance_by_position(calls: Iterable[Call]) -> list[Position]:
    """The acceptance at each draft position, among the rounds that reached it."""
    # Here because it takes a second.
    from scipy.stats import binomtest

    reached: list[int] = []
    accepted: list[int] = []
    for drafted, kept, *_ in row_rounds(calls):
        for position in range(min(kept + 1, drafted)):
            if position == len(reached):
                reached.append(0)
                accepted.append(0)
            reached[position] += 1
            accepted[position] += position < kept
    found = []
    for hits, total in zip(accepted, reached, strict=True):
        ends = binomtest(hits, total).proportion_ci(method="wilson")
        found.append(Position(total, hits, float(ends.low), float(ends.high)))
    return found


def waiting(calls: Iterable[Call]) -> float | None:
    """Share of row-rounds in which a row had ended and waited for the batch's slowest; None without rounds."""
    flags = [new == 0 for call in calls if call.rounds for row in call.rounds.new_tokens for new in row]
    return sum(flags) / len(flags) if flags else None


def time_per_round(calls: Iterable[Call]) -> dict[str, float] | None:
    """Mean seconds of a round's `draft`, `verify` and `overhead` (the rest of it), and mean `draft_steps`.

    Without each call's first round, which reads the prompt. None if the method does not report times.
    """
    told = [call for call in calls if call.spent is not None and call.rounds is not None]
    count = sum(len(call.rounds.width) - 1 for call in told if call.rounds)
    if not count:
        return None
    draft, verify, whole = (
        sum(getattr(call.spent, part) for call in told) / count for part in ("draft", "verify", "whole")
    )
    steps = sum(sum(call.rounds.draft_steps[1:]) for call in told if call.rounds) / count
    return {"draft": draft, "verify": verify, "overhead": whole - draft - verify, "draft_steps": steps}
