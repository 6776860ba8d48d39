"""Pictures of the task sweep."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan, nan
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_specdec.bench.reports.pictures.drawing import LINES, deviation, limits, new_figure, short_name
from hf_specdec.bench.reports.pictures.tradeoff import rouge
from hf_specdec.bench.reports.tables import sweep as sweep_tables

Result = Mapping[str, Any]


def speedup_over_lookahead(result: Result) -> Figure:
    """Sweep: speedup of speculative decoding over the lookahead, a line a draft; bars are standard deviations."""
    figure, axes = new_figure(7, 4.5)
    methods = sweep_tables.methods_of(result, "speculative")
    for number, draft in enumerate(dict.fromkeys(method["draft"] for method in methods)):
        mine = sorted((m for m in methods if m["draft"] == draft), key=lambda method: int(method["lookahead"]))
        points = [(m["lookahead"], ratios) for m in mine if (ratios := sweep_tables.speedups(result, m))]
        label = f"{short_name(draft)} ({sweep_tables.parameters(mine[0]['draft_parameters'])})"
        axes.errorbar(
            [lookahead for lookahead, _ in points],
            [mean(ratios) for _, ratios in points],
            yerr=[deviation(ratios) for _, ratios in points],
            color=LINES[number % len(LINES)],
            marker="o",
            capsize=3,
            label=label,
        )
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(sorted({method["lookahead"] for method in methods}))
    axes.set_xlabel("n_lookahead (draft tokens per round)")
    axes.set_ylabel("Speedup over plain decoding (×)")
    axes.set_title("Where each draft peaks: longer drafts cost more and are accepted less")
    axes.legend(title="Draft (parameters)")
    return figure


def threshold_maps(result: Result, draft: str, lookahead: int) -> Figure:
    """Sweep: BiLD's speedup and quality over fallback and rollback threshold, of one draft and lookahead."""
    methods = [
        method
        for method in sweep_tables.methods_of(result, "bild")
        if (method["draft"], method["lookahead"]) == (draft, lookahead)
    ]
    speeds = {(m["fallback"], m["rollback"]): mean(sweep_tables.speedups(result, m) or [nan]) for m in methods}
    maps = [("Speedup over plain decoding (×)", "viridis", speeds, 0.1)]
    if result["quality"]:
        qualities = {(m["fallback"], m["rollback"]): rouge(result, m["name"]) for m in methods}
        plain = rouge(result, "plain")
        maps.append((f"ROUGE-L, 0–100 (plain decoding: {plain:.1f})", "cividis", qualities, 2.0))
    columns = len({method["rollback"] for method in methods})
    figure = Figure(figsize=(len(maps) * (2.6 + 0.75 * columns), 4.4), dpi=120, layout="constrained")
    for number, (title, colours, values, span) in enumerate(maps, start=1):
        _heat_map(figure, figure.add_subplot(1, len(maps), number), title, colours, values, span)
    figure.suptitle(
        f"BiLD with {short_name(draft)}, lookahead {lookahead}: what each pair of thresholds brings, and costs"
    )
    return figure


def _heat_map(
    figure: Figure, axes: Axes, title: str, colours: str, values: Mapping[tuple[float, float], float], span: float
) -> None:
    """The colours span at least `span`, so that noise doesn't look like a difference; nan stands for unknown."""
    fallbacks, rollbacks = (sorted({key[place] for key in values}) for place in (0, 1))
    grid = [[values[fallback, rollback] for rollback in rollbacks] for fallback in fallbacks]
    low, high = limits(values.values(), span)
    image = axes.imshow(grid, cmap=colours, aspect="auto", origin="lower", vmin=low, vmax=high)
    middle = (low + high) / 2
    digits = ".2f" if span < 1 else ".1f"
    for row, line in enumerate(grid):
        for column, value in enumerate(line):
            colour = "white" if value <= middle else "black"
            text = "–" if isnan(value) else f"{value:{digits}}"
            axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(len(rollbacks)), [f"{value:g}" for value in rollbacks])
    axes.set_yticks(range(len(fallbacks)), [f"{value:g}" for value in fallbacks])
    axes.set_xlabel("Rollback threshold (nats)")
    axes.set_ylabel("Fallback threshold (probability)")
    axes.set_title(title, fontsize="medium")
    figure.colorbar(image, ax=axes)
