"""The rounds of a call in columns: of this package's loop, and of transformers' loops, seen from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import hf_specdec


@dataclass(frozen=True)
class Rounds:
    """The rounds of a call: `[round][row]`, and `[round]` for `draft_steps` and `width`, which are the batch's.

    Args:
        drafted, accepted, new_tokens: tokens; see `hf_specdec.Round`.
        overlap: sum over the positions reached of the overlap of both distributions; None where it isn't told.
        draft_steps: forward passes of the draft.
        width: tokens per row in the target's pass.
    """

    drafted: list[list[int]]
    accepted: list[list[int]]
    new_tokens: list[list[int]]
    overlap: list[list[float]] | None
    draft_steps: list[int]
    width: list[int]


@dataclass(frozen=True)
class Spent:
    """Seconds of all rounds after a call's first, which holds the prompt: drafting, verifying, and the whole."""

    draft: float
    verify: float
    whole: float


def our_rounds(stats: hf_specdec.SpeculationStats) -> tuple[Rounds, Spent]:
    """From the statistics of a call of ours; overlaps to four digits."""
    listed = stats.rounds
    rounds = Rounds(
        drafted=[list(item.drafted) for item in listed],
        accepted=[list(item.accepted) for item in listed],
        new_tokens=[list(item.new_tokens) for item in listed],
        overlap=[[round(value, 4) for value in item.overlap] for item in listed],
        draft_steps=[item.draft_steps for item in listed],
        width=[item.width for item in listed],
    )
    spent = Spent(
        draft=sum(item.draft_seconds for item in listed[1:]),
        verify=sum(item.verify_seconds for item in listed[1:]),
        whole=sum(item.seconds for item in listed[1:]),
    )
    return rounds, spent


def streamed_rounds(
    tokens: Sequence[int], puts: Sequence[int], drafts: Sequence[Sequence[int]], *, greedy: bool, draft_passes: bool
) -> Rounds:
    """From what transformers' loop streamed and its generator drafted, at batch size 1.

    It streams one round a put; the last token of each is the target's own, the others accepted. A last token that
    the draft had at its place was accepted, too: there the text ended, as at an accepted EOS. A token of the
    target's own is never the one that it refused. With a single token left transformers does not ask the draft, so
    there may be fewer drafts. In greedy decoding the overlap at a position is whether the target agrees; in sampling
    transformers doesn't tell.

    Args:
        tokens: all new ones.
        puts: how many each round streamed.
        drafts: of each round.
        draft_passes: whether a drafted token takes a forward pass.
    """
    lengths, accepted, end = [], [], 0
    for place, new in enumerate(puts):
        draft = list(drafts[place]) if place < len(drafts) else []
        end += new
        accepted.append(new if draft[new - 1 : new] == [tokens[end - 1]] else new - 1)
        lengths.append(len(draft))
    return Rounds(
        drafted=[[n] for n in lengths],
        accepted=[[n] for n in accepted],
        new_tokens=[[n] for n in puts],
        overlap=[[float(n)] for n in accepted] if greedy else None,
        draft_steps=lengths if draft_passes else [0] * len(lengths),
        width=[n + 1 for n in lengths],
    )
