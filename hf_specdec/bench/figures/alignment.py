"""What aligning a draft with its target has changed, from the calls with the draft before and after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hf_specdec.bench.figures.bootstrap import Interval, interval
from hf_specdec.bench.figures.rounds import row_rounds
from hf_specdec.bench.figures.speed import by_question, calls_of

BEFORE, AFTER = "before", "after"  # the names of the methods


def acceptance_gain(result: Mapping[str, Any], prompts: Iterable[int] | None = None) -> Interval | None:
    """Acceptance rate after minus before, in points of 100, with its 95% interval by a paired bootstrap over questions.

    None where either draft drafted nothing.
    """
    wanted = None if prompts is None else set(prompts)
    sides = []
    for name in (AFTER, BEFORE):
        counts: dict[Any, dict[int, tuple[float, float]]] = {}
        for call in calls_of(result, name, prompts=wanted):
            listed = list(row_rounds([call]))
            accepted, drafted = sum(item[1] for item in listed), sum(item[0] for item in listed)
            counts.setdefault(call.prompts, {})[call.repeat] = float(accepted), float(drafted)
        sides.append(counts)
    after, before = sides
    if any(not sum(drafted for one in side.values() for _, drafted in one.values()) for side in sides):
        return None
    both = {key: {repeat: (*counts, *before[key][repeat]) for repeat, counts in after[key].items()} for key in after}

    def points(accepted: Any, drafted: Any, accepted_before: Any, drafted_before: Any) -> Any:
        return 100 * (accepted / drafted - accepted_before / drafted_before)

    return interval(by_question(result, both), points)
