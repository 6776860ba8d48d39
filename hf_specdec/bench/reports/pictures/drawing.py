"""Colours, figures and legends that all pictures share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from statistics import stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_specdec.bench.reports.markdown import capital

Result = Mapping[str, Any]

# Colours that colour-blind readers can tell apart (Okabe and Ito); a method or engine keeps its colour everywhere.
GREY, BLUE, VERMILION, GREEN = "#999999", "#0072B2", "#D55E00", "#009E73"
PURPLE, ORANGE, SKY, PALE = "#CC79A7", "#E69F00", "#56B4E9", "#BBBBBB"
COLOURS = {
    "plain": GREY,
    "speculative": BLUE,
    "bild": VERMILION,
    "assisted": GREEN,
    "prompt_lookup": PURPLE,
    "eager": SKY,
    "static": ORANGE,
    "compiled": BLUE,
}
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY)


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def bar(
    axes: Axes, at: float, height: float, repeats: Sequence[float], colour: str, label: str | None, result: Result
) -> None:
    """A bar with the extremes of the repeats; how wide depends on how many methods stand side by side."""
    ends = None
    if len(repeats) > 1:
        ends = [[max(0.0, height - min(repeats))], [max(0.0, max(repeats) - height)]]
    width = 0.8 / max(1, len(result["methods"]))
    axes.bar(at, height, width=width, yerr=ends, capsize=2, color=colour, label=label, error_kw={"linewidth": 1})


def offset(place: int, number: int, count: int) -> float:
    return place + 0.8 * ((number + 0.5) / count - 0.5)


def limits(values: Iterable[float], span: float) -> tuple[float, float]:
    """Lowest and highest of those known, moved apart to `span` where they are closer."""
    listed = [value for value in values if not isnan(value)]
    low, high = min(listed, default=0.0), max(listed, default=0.0)
    more = max(0.0, span - (high - low)) / 2
    return low - more, high + more


def deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def colour_of(method: Mapping[str, Any]) -> str:
    return COLOURS.get(method["name"], ORANGE)


def short_name(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def wrapped(title: str) -> str:
    return capital(title).replace(" (", "\n(", 1)


def legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    # Three long names side by side need a wide figure.
    columns = min(3 if figure.get_figwidth() > 9 or max(map(len, labels)) < 20 else 2, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small", frameon=False)
