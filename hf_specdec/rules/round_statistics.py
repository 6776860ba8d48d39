"""Statistics of a call as data: a `Round` per round, and the figures derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


def reached_overlap(overlap: Sequence[float], accepted: int, drafted: int) -> float:
    """A row's `Round.overlap`, from the overlaps of its drafted positions (`Verification.overlap`)."""
    return sum(overlap[: min(accepted + 1, drafted)])


@dataclass(frozen=True)
class Round:
    """One draft-verify-accept round over the whole batch; tuples hold one entry per row.

    Args:
        drafted: tokens drafted.
        accepted: drafted tokens that the verification rule kept.
        new_tokens: tokens that the round added to the row: the accepted ones and the target's own, without those
            past the end of the row.
        overlap: Σ over the reached drafted positions of Σ_x min(p(x), q(x)), Leviathan et al. 2023's α per
            position; in greedy decoding the count of positions at which the target agrees.
        draft_steps: forward passes of the draft, including those whose drafts were discarded.
        width: tokens per row in the target's pass, including the prompt in the first round.
        draft_seconds: time spent drafting before the target's pass.
        verify_seconds: time in the target's pass, the processors and the acceptance rule, until the result is known
            on the host.
        seconds: the whole round.
        catch_up_seconds: the part of `draft_seconds` spent on a separate pass over tokens that the draft had not read
            yet (the prompt, and tokens of rounds without drafts); 0 if the first draft step reads them.
        room: the most tokens that could be drafted within a row's maximum length; () if unknown.
        settled: whether the target's pass took as long as later ones of its shape: not while it is being recorded,
            and not right after it was compiled or captured.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    new_tokens: tuple[int, ...]
    overlap: tuple[float, ...]
    draft_steps: int
    width: int
    draft_seconds: float
    verify_seconds: float
    seconds: float
    catch_up_seconds: float = 0.0
    room: tuple[int, ...] = ()
    settled: bool = True

    @property
    def reached(self) -> tuple[int, ...]:
        """Drafted positions up to and including the first rejected one, which the target's own token replaces."""
        rows = zip(self.accepted, self.drafted, self.new_tokens, strict=True)
        return tuple(min(a + (n > a), d) for a, d, n in rows)


@dataclass
class SpeculationStats:
    """The statistics of one `generate` call; rates are None where nothing was drafted or decoded."""

    strategy: str
    rounds: list[Round] = field(default_factory=list)

    @property
    def drafted(self) -> int:
        """Tokens drafted, over all rows and rounds."""
        return sum(sum(r.drafted) for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafted tokens that the verification rule kept."""
        return sum(sum(r.accepted) for r in self.rounds)

    @property
    def new_tokens(self) -> int:
        """Tokens delivered, the target's own included."""
        return sum(sum(r.new_tokens) for r in self.rounds)

    @property
    def target_passes(self) -> int:
        """Verification passes that a row took part in, summed over rows: the denominator of `tokens_per_round`."""
        return sum(sum(n > 0 for n in r.new_tokens) for r in self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafted tokens / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """τ: new tokens / target passes, the target's own token included."""
        return self.new_tokens / self.target_passes if self.target_passes else None

    @property
    def alpha(self) -> float | None:
        """α (Leviathan et al. 2023, definition 3.1): the mean of Σ_x min(p(x), q(x)) over reached positions."""
        reached = sum(sum(r.reached) for r in self.rounds)
        return sum(sum(r.overlap) for r in self.rounds) / reached if reached else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Acceptance rate at each draft position, among the rounds that reached it."""
        longest = max((max(r.drafted) for r in self.rounds), default=0)
        reached, accepted = [0] * longest, [0] * longest
        for r in self.rounds:
            for row_reached, row_accepted in zip(r.reached, r.accepted, strict=True):
                for position in range(row_reached):
                    reached[position] += 1
                    accepted[position] += position < row_accepted
        return [a / n for a, n in zip(accepted, reached, strict=True) if n]

    @property
    def draft_seconds(self) -> float:
        """Seconds spent drafting."""
        return sum(r.draft_seconds for r in self.rounds)

    @property
    def verify_seconds(self) -> float:
        """Seconds spent in the target's passes and the acceptance rule."""
        return sum(r.verify_seconds for r in self.rounds)

    @property
    def seconds(self) -> float:
        """Seconds spent in rounds."""
        return sum(r.seconds for r in self.rounds)

    def __str__(self) -> str:
        """One line; `repr` shows all rounds."""
        return (
            f"{self.strategy}: {self.new_tokens} tokens in {self.target_passes} target passes, {self.accepted} of "
            f"{self.drafted} drafted tokens accepted"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-serialisable data, the rounds included."""
        return {
            "strategy": self.strategy,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "new_tokens": self.new_tokens,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": self.tokens_per_round,
            "alpha": self.alpha,
            "acceptance_by_position": self.acceptance_by_position,
            "rounds": [asdict(r) for r in self.rounds],
        }
