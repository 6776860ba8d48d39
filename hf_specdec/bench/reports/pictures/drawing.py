"""What all pictures share: colours, sizes, intervals and captions."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from hf_specdec.bench.figures.bootstrap import Interval
from hf_specdec.bench.reports.markdown import capital, ratio

# Colours that colour-blind readers can tell apart (Okabe and Ito).
BLACK, GREY, BLUE, VERMILION, GREEN = "#000000", "#999999", "#0072B2", "#D55E00", "#009E73"
PURPLE, ORANGE, SKY, PALE = "#CC79A7", "#E69F00", "#56B4E9", "#CCCCCC"
INDIGO, OLIVE = "#332288", "#999933"  # of Paul Tol's muted scheme
BY_KIND = {
    "plain": GREY,
    "none": BLACK,
    "assisted": GREEN,
    "ensemble": ORANGE,
    "lookup": PURPLE,
    "speculative": BLUE,
    "bild": VERMILION,
    "lenient": INDIGO,
    "typical": OLIVE,
    "llama.cpp": SKY,
}
BY_ENGINE = {"generate": GREY, "eager": SKY, "static": ORANGE, "compiled": BLUE}
LINES = (BLUE, VERMILION, ORANGE, SKY, PURPLE, GREEN, GREY, BLACK)

# Names come from data sets, where a dollar sign begins no formula.
matplotlib.rcParams["text.parse_math"] = False

WIDTH = 8.0  # inches; GitHub shows a page about 840 pixels wide
DPI = 105
_COLOURS = 128  # of a PNG: a third of the bytes of all colours


def new_figure(height: float, columns: int = 1, *, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a page with axes side by side."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    grid = figure.subplots(1, columns, sharey=sharey, squeeze=False)
    axes = list(grid[0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def png(figure: Figure) -> bytes:
    """The figure as a small PNG with few colours."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    # An octree keeps thin coloured lines apart, which the default merges with others.
    image = (
        Image.open(drawn).convert("RGB").quantize(_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    )
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def errors(found: Interval) -> list[list[float]]:
    """The interval as matplotlib takes it: [[below], [above]]."""
    low = found.value if found.low is None else found.low
    high = found.value if found.high is None else found.high
    return [[max(0.0, found.value - low)], [max(0.0, high - found.value)]]


def sure(found: Interval, neutral: float = 1.0) -> bool:
    """Whether the interval excludes the neutral value."""
    return found.low is not None and found.high is not None and not found.low <= neutral <= found.high


def draw_ratio(axes: Axes, place: float, found: Interval, colour: str, *, label: str | None = None) -> None:
    """A point with its interval on a horizontal axis; hollow where the interval includes 1."""
    axes.errorbar(
        found.value,
        place,
        xerr=errors(found),
        marker="o",
        markersize=5,
        color=colour,
        markerfacecolor=colour if sure(found) else "white",
        capsize=2,
        linestyle="none",
        label=label,
    )


def ratio_panel(axes: Axes, rows: Sequence[tuple[str, Interval | None, str]], *, numbers: bool = True) -> None:
    """One row per ratio, the first on top, with a line at 1 and the figures at the right edge."""
    for place, (_, found, colour) in enumerate(rows):
        if found is None:
            continue
        draw_ratio(axes, place, found, colour)
        if numbers:
            text: dict[str, Any] = {
                "transform": axes.get_yaxis_transform(),
                "va": "center",
                "ha": "right",
                "fontsize": "small",
            }
            axes.text(1.0, place - 0.4, ratio(found), **text)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.margins(x=0.12)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)


def offset(place: float, number: int, count: int) -> float:
    """The position of one of `count` points side by side around `place`."""
    return place + 0.8 * ((number + 0.5) / count - 0.5)


def wide_enough(values: Iterable[float], span: float) -> tuple[float, float]:
    """Lowest and highest value, at least `span` apart, so that noise doesn't look like a difference."""
    listed = list(values)
    low, high = min(listed, default=0.0), max(listed, default=0.0)
    more = max(0.0, span - (high - low)) / 2
    return low - more, high + more


def caption(figure: Figure, *sentences: str | None) -> None:
    """Sentences beneath the picture."""
    text = " ".join(sentence for sentence in sentences if sentence)
    figure.supxlabel(_broken(text, 125), fontsize="small", color="0.25", x=0.01, ha="left")


def legend(axes: Axes, width: int = 100) -> None:
    """Between the axes and the figure's title, at most so many characters wide."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [_broken(label, width) for label in labels]
    columns = max(1, min(len(labels), int(width / (max(map(len, labels), default=1) + 8))))
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.3}
    axes.legend(handles, labels, **place, ncols=columns, fontsize="small", frameon=False)


def title_of(method: Mapping[str, Any], width: int = 50) -> str:
    """A method's title for an axis, on several lines."""
    return _broken(capital(method["title"]), width)


def _broken(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_long_words=False))
