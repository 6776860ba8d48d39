"""Pictures of the task tune."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import Interval
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports.pictures.drawing import (
    BY_KIND,
    PALE,
    caption,
    new_figure,
    of_intervals,
    ratio_panel,
    title_of,
)
from hf_specdec.bench.reports.pictures.gains import HOLLOW
from hf_specdec.bench.reports.tables.tune import tried


def candidates_by_stage(result: Result, tuned: Mapping[str, Any]) -> Figure:
    """One point per candidate: its speedup in the last stage that it reached, with lines between the stages."""
    found = tried(tuned)
    shown = [speed.method_named(result, name) for name, *_ in found]
    rows: list[tuple[str, Interval | None, str]] = []
    for method, (name, stage, gain, examples) in zip(shown, found, strict=True):
        mark = " ★" if name == tuned["choice"] else ""
        rows.append((f"{title_of(method, 80)}{mark}  [{stage}, {examples}]", gain, BY_KIND[method["kind"]]))
    figure, (axes,) = new_figure(1.6 + 0.3 * len(rows), explain=shown)
    ratio_panel(axes, rows)
    for place, (before, after) in enumerate(pairwise(found)):
        if before[1] != after[1]:
            axes.axhline(place + 0.5, color=PALE, linewidth=1)
    axes.tick_params(axis="y", labelsize="x-small")
    axes.set_xlabel("Speedup over plain generate(), end to end (×)")
    figure.suptitle(f"Candidates by the stage that they reached, batch size {tuned['batch']}")
    caption(
        figure, of_intervals(result, HOLLOW), "In brackets: race.stage, and examples measured by then. ★: the choice."
    )
    return figure
