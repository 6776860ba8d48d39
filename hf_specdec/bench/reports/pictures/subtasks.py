"""Pictures of the task subtasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed, tradeoff
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import bar, colour_of, legend_below, new_figure, offset
from hf_specdec.bench.reports.tables import subtasks as subtasks_tables

Result = Mapping[str, Any]


def speedup_by_subtask(result: Result) -> Figure:
    """Subtasks: speedup over plain decoding of each method on each subtask; the bars' ends are repeats' extremes."""
    labels: list[str | None] = [*tradeoff.labels(result), None]
    methods = result["methods"][1:]
    figure, axes = new_figure(max(8.0, 2 + 1.15 * len(labels)), 5)
    overall = []
    for place, label in enumerate(labels):
        prompts = tradeoff.prompts_of(result, label)
        for number, method in enumerate(methods):
            ratios = speed.speedup_by_repeat(result["runs"], method["name"], "plain", prompts)
            ratio = speed.middle(ratios) or 0.0
            title = capital(method["title"]) if place == 0 else None
            if label is None and method["name"] in ("speculative", "bild"):
                overall.append(f"{subtasks_tables.SHORT[method['name']]} {ratio:.2f}×")
            bar(axes, offset(place, number, len(methods)), ratio, ratios, colour_of(method), title, result)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(labels)), [(label or "all").replace(" ", "\n").replace("_", "\n") for label in labels])
    axes.set_xlabel("Subtask")
    axes.set_ylabel("Speedup over plain decoding (×)")
    axes.set_title(f"Faster than plain decoding above the line; over all examples: {', '.join(overall)}")
    legend_below(figure, axes)
    return figure
