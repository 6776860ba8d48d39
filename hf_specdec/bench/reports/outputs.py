"""How many outputs equal those of a baseline, and where the others first differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hf_specdec.bench.figures import speed

Result = Mapping[str, Any]
Place = tuple[int, int, int]  # batch size, prompt or group, row


def equal_outputs(
    result: Result,
    method: str,
    baseline: str = "plain",
    *,
    prompts: Collection[int] | None = None,
    batch: int | None = None,
) -> str:
    """`"9 of 10"`; – in sampling, where outputs are drawn."""
    if result["sampling"]:
        return "–"
    total = len(_outputs(result, method, prompts, batch))
    return f"{total - len(differences(result, method, baseline, prompts=prompts, batch=batch))} of {total}"


def differences(
    result: Result,
    method: str,
    baseline: str = "plain",
    *,
    prompts: Collection[int] | None = None,
    batch: int | None = None,
) -> list[tuple[Place, int]]:
    """The outputs that differ from the baseline's, each with its first token that does."""
    mine, theirs = (_outputs(result, name, prompts, batch) for name in (method, baseline))
    found = ((place, speed.first_divergence(tokens, theirs[place])) for place, tokens in mine.items())
    return [(place, position) for place, position in found if position is not None]


def _outputs(result: Result, method: str, prompts: Collection[int] | None, batch: int | None) -> dict[Place, list[int]]:
    """The new tokens of every row in the first repeat."""
    outputs: dict[Place, list[int]] = {}
    for run in result["runs"]:
        size = run.get("batch", 1)
        first = run["group"] if "group" in run else run["prompt"]
        wanted = batch in (None, size) and (prompts is None or first in prompts)
        if run["method"] == method and not run["repeat"] and wanted:
            rows = run["tokens"] if "group" in run else [run["tokens"]]
            outputs |= {(size, first, row): tokens for row, tokens in enumerate(rows)}
    return outputs
