"""How many outputs equal those of a baseline, and where the others first differ."""

from __future__ import annotations

from collections.abc import Iterable

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.divergence import first_divergence
from hf_specdec.bench.figures.result import Result

Place = tuple[int, int]  # batch size, prompt


def equal_outputs(
    result: Result, method: str, baseline: str, *, prompts: Iterable[int] | None = None, batch: int | None = None
) -> str:
    """`9 of 10`; – in sampling, where outputs are drawn."""
    if result["sampling"]:
        return "–"
    total = len(_outputs(result, method, prompts, batch))
    return f"{total - len(differences(result, method, baseline, prompts=prompts, batch=batch))} of {total}"


def differences(
    result: Result, method: str, baseline: str, *, prompts: Iterable[int] | None = None, batch: int | None = None
) -> list[tuple[Place, int]]:
    """The outputs that differ from the baseline's at the same batch size, each with the first position that differs."""
    mine, theirs = (_outputs(result, name, prompts, batch) for name in (method, baseline))
    found = ((place, first_divergence(tokens, theirs[place])) for place, tokens in mine.items() if place in theirs)
    return [(place, position) for place, position in found if position is not None]


def _outputs(result: Result, method: str, prompts: Iterable[int] | None, batch: int | None) -> dict[Place, list[int]]:
    """The new tokens of every row in the first repeat."""
    calls = speed.calls_of(result, method, prompts=prompts, batch=batch, repeat=0)
    return {
        (call.batch, prompt): tokens for call in calls for prompt, tokens in zip(call.prompts, call.tokens, strict=True)
    }
