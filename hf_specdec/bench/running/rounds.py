"""Sums over the rounds of a call, of this package's loop and, observed from outside, of transformers' loops."""

from __future__ import annotations

from collections.abc import Sequence

import hf_specdec
from hf_specdec.bench.records import Rounds
from hf_specdec.rules.round_statistics import Round


def summary(rounds: Sequence[Round], *, overlap: bool = True, times: bool = False) -> Rounds:
    """The rounds of a call; those of a row after its end count nowhere.

    Args:
        overlap: whether the rounds hold the overlap.
        times: whether the rounds hold times.
    """
    rows = [
        row
        for one in rounds
        for row in zip(one.drafted, one.accepted, one.new_tokens, one.overlap or (0.0,) * len(one.drafted), strict=True)
        if row[2] > 0
    ]
    later = rounds[1:]
    return Rounds(
        first_tokens=sum(rounds[0].new_tokens),
        rounds=len(rounds),
        row_rounds=len(rows),
        drafted=sum(drafted for drafted, *_ in rows),
        accepted=sum(accepted for _, accepted, *_ in rows),
        reached=_at_least([min(accepted + 1, drafted) for drafted, accepted, *_ in rows]),
        kept=_at_least([accepted for _, accepted, *_ in rows]),
        overlap=round(sum(row[3] for row in rows), 4) if overlap else None,
        steps=_counts([one.draft_steps for one in later]),
        widths=_counts([one.width for one in later]),
        draft_seconds=sum(one.draft_seconds for one in later) if times else None,
        verify_seconds=sum(one.verify_seconds for one in later) if times else None,
        round_seconds=sum(one.seconds for one in later) if times else None,
    )


def _counts(values: Sequence[int]) -> tuple[int, ...]:
    """Count how often 0, 1, 2, … occur."""
    return tuple(values.count(number) for number in range(max(values, default=-1) + 1))


def _at_least(values: Sequence[int]) -> tuple[int, ...]:
    """Count the values that are at least 1, at least 2, …."""
    return tuple(sum(value > place for value in values) for place in range(max(values, default=0)))


def streamed_rounds(
    tokens: Sequence[int], puts: Sequence[int], drafts: Sequence[Sequence[int]], *, greedy: bool, draft_passes: bool
) -> Rounds:
    """Reconstruct rounds from what transformers' loop streamed and its generator drafted, at batch size 1.

    The loop streams one round per put; its last token is the target's own, the others were accepted. If the draft
    proposed the last token too, it was accepted: the text ended there, as at an accepted EOS, since the target's own
    token never equals the one it rejected. With a single token left, transformers does not ask the draft, so there may
    be fewer drafts than rounds. In greedy decoding the overlap at a position is whether the target agrees; in sampling
    it is unknown.

    Args:
        tokens: all new tokens.
        puts: number of tokens streamed in each round.
        drafts: drafted tokens of each round.
        draft_passes: whether each drafted token takes a forward pass.
    """
    found, end = [], 0
    for place, new in enumerate(puts):
        draft = list(drafts[place]) if place < len(drafts) else []
        end += new
        accepted = new if draft[new - 1 : new] == [tokens[end - 1]] else new - 1
        found.append(counted_round([len(draft)], [accepted], [new], len(draft) if draft_passes else 0, len(draft) + 1))
    return summary(found, overlap=greedy)


def counted_round(drafted: Sequence[int], accepted: Sequence[int], new: Sequence[int], steps: int, width: int) -> Round:
    """Build a `Round` from counts, in greedy decoding, where the overlap is the number of accepted tokens."""
    overlap = tuple(map(float, accepted))
    return hf_specdec.Round(tuple(drafted), tuple(accepted), tuple(new), overlap, steps, width, 0.0, 0.0, 0.0)
