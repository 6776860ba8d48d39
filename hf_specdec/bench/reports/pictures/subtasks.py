"""Pictures of the task subtasks."""

from __future__ import annotations

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed, tradeoff
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import (
    BY_KIND,
    caption,
    draw_ratio,
    legend,
    new_figure,
    of_intervals,
    offset,
)
from hf_specdec.bench.reports.pictures.gains import HOLLOW
from hf_specdec.bench.reports.tables import methods
from hf_specdec.bench.reports.tables.subtasks import drafting_methods


def speedup_by_subtask(result: Result, which: str) -> Figure:
    """The speedup of each method over a baseline on each subtask, and over all."""
    labels: list[str | None] = [*tradeoff.labels(result), None]
    shown = drafting_methods(result, which)
    figure, (axes,) = new_figure(1.6 + 0.13 * len(labels) * max(2, len(shown)))
    named: set[str] = set()
    for place, label in enumerate(labels):
        prompts = tradeoff.prompts_of(result, label)
        if place % 2:
            axes.axhspan(place - 0.5, place + 0.5, color="0.96", zorder=0)
        for number, method in enumerate(shown):
            gain = methods.over(result, method, which, prompts=prompts)
            if gain is not None:
                title = capital(method["title"])
                first = title if title not in named else None
                named.add(title)
                draw_ratio(axes, offset(place, number, len(shown)), gain, BY_KIND[method["kind"]], label=first)
    axes.axvline(1, color="black", linewidth=1)
    counts = [len(tradeoff.prompts_of(result, label)) for label in labels]
    names = [f"{(label or 'all').replace('_', ' ')} ({count})" for label, count in zip(labels, counts, strict=True)]
    axes.set_yticks(range(len(labels)), names)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(f"Speedup over {speed.BASELINES[which]} (×)")
    figure.suptitle("Decoding speed by subtask (examples in brackets)")
    legend(axes)
    caption(figure, of_intervals(result, HOLLOW))
    return figure
