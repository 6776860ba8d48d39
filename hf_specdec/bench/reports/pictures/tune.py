"""Pictures of the task tune."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import ENOUGH, Interval
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.reports.pictures.drawing import (
    BY_KIND,
    GREY,
    caption,
    new_figure,
    of_intervals,
    ratio_panel,
    title_of,
)
from hf_specdec.bench.reports.pictures.gains import HOLLOW
from hf_specdec.bench.reports.tables.tune import last_ratios, tried

_FINALISTS = 6  # at most: where time ends early, all are in the last stage
_WIDEST = 2.5  # where the axis ends, over the highest speedup: intervals beyond it would squeeze all others

Tuned = Mapping[str, Any]
Tried = tuple[str, str, Interval, int]  # see `tables.tune.tried`


def fastest_candidates(result: Result, tuned: Tuned) -> Figure:
    """The speedups of the finalists and, below a line, of the best other candidate of each family."""
    finalists, others = shown(result, tuned)
    listed = [speed.method_named(result, name) for name, *_ in (*finalists, *others)]
    rows = [_row(result, tuned, one) for one in finalists]
    if others:
        rows += [("", None, GREY), *(_row(result, tuned, one) for one in others)]
    figure, (axes,) = new_figure(1.8 + 0.42 * len(rows), explain=listed)
    ratio_panel(axes, rows)
    if others:
        axes.axhline(len(finalists), color=GREY, linewidth=1)
    highest = max(gain.value for _, _, gain, _ in (*finalists, *others))
    edge = min(axes.get_xlim()[1], _WIDEST * max(1.0, highest))
    axes.set_xlim(right=edge)
    axes.tick_params(axis="y", labelsize="small", length=0)
    axes.set_xlabel("Speedup over plain generate(), end to end (×)")
    figure.suptitle(f"Fastest candidates, batch size {tuned['batch']}")
    cut = any(gain.high is not None and gain.high > edge for _, _, gain, _ in (*finalists, *others))
    caption(figure, *_sentences(result, tuned, finalists, others, cut=cut))
    return figure


def shown(result: Result, tuned: Tuned) -> tuple[list[Tried], list[Tried]]:
    """The fastest of the race that decides, and of each family without a finalist the candidate that got furthest."""
    found = {one[0]: one for one in tried(tuned)}
    ranking = enumerate(last_ratios(tuned))
    finalists = [found[name] for place, name in ranking if place < _FINALISTS or name == tuned["choice"]]
    families = {_family(speed.method_named(result, name)) for name, *_ in finalists}
    others = []
    for name, one in found.items():
        family = _family(speed.method_named(result, name))
        if family not in families:
            families.add(family)
            others.append(one)
    return finalists, others


def _family(method: MethodDict) -> tuple[str, str, str]:
    """The strategy, the engine, and what drafts if it is not a model alone."""
    return method["kind"], method["engine"], method["keywords"].get("drafter", "")


def _row(result: Result, tuned: Tuned, one: Tried) -> tuple[str, Interval | None, str]:
    name, _, gain, examples = one
    method = speed.method_named(result, name)
    mark = "★ " if name == tuned["choice"] else ""
    measured = f"{examples}\N{NO-BREAK SPACE}example{'s' if examples > 1 else ''}"
    return mark + title_of({"title": f"{method['title']} [{measured}]"}, 56), gain, BY_KIND[method["kind"]]


def _sentences(
    result: Result, tuned: Tuned, finalists: Sequence[Tried], others: Sequence[Tried], *, cut: bool
) -> list[str | None]:
    number = len(tried(tuned))
    rest = number - len(finalists) - len(others)
    return [
        of_intervals(result, HOLLOW),
        f"No bar: fewer than {ENOUGH} examples.",
        "Bars at the right edge go on beyond it." if cut else None,
        "★: the choice." if tuned["choice"] is not None else "Nothing is chosen.",
        "Below the line: the best of each other strategy and engine, which dropped out earlier." if others else None,
        f"Not shown: {rest} more of the {number} candidates, which are in the table." if rest else None,
    ]
