"""Shared parts of pictures: colours, sizes, intervals and captions."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from hf_specdec.bench.figures.bootstrap import ENOUGH
from hf_specdec.bench.figures.frames import Part, examples
from hf_specdec.bench.records import Interval
from hf_specdec.bench.reports.heading import unsteady

# Colours that colour-blind readers can tell apart (Okabe and Ito; indigo and olive of Paul Tol's muted scheme).
BLACK, GREY, BLUE, VERMILION, GREEN = "#000000", "#999999", "#0072B2", "#D55E00", "#009E73"
PURPLE, ORANGE, SKY, INDIGO, OLIVE = "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#999933"
# Colour and name of each kind of method.
KINDS = {
    "plain": (GREY, "Plain generate()"),
    "none": (BLACK, "Plain on our loop"),
    "assisted": (GREEN, "Transformers' assisted"),
    "ensemble": (ORANGE, "Ensemble"),
    "lookup": (PURPLE, "Transformers' prompt lookup"),
    "speculative": (BLUE, "Speculative"),
    "bild": (VERMILION, "BiLD"),
    "lenient": (INDIGO, "Lenient"),
    "typical": (OLIVE, "Typical acceptance"),
    "llama.cpp": (SKY, "llama.cpp"),
}
ENGINES = {
    "generate": GREY, "eager": GREEN, "recorded": SKY, "static": ORANGE, "compiled": BLUE,
}  # fmt: skip
LINES = (BLUE, VERMILION, ORANGE, SKY, PURPLE, GREEN, GREY, BLACK)

# Names come from data sets, where a dollar sign does not begin a formula.
matplotlib.rcParams["text.parse_math"] = False

WIDTH, DPI = 8.0, 80  # inches; GitHub shows a page about 840 pixels wide
_COLOURS = 64  # colours of a PNG: a third of the bytes of one with all colours


def new_figure(height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a page with axes side by side, `height` inches high with title and caption."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def png(figure: Figure) -> bytes:
    """Render the figure as a small PNG with few colours."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    # An octree preserves thin coloured lines, which the default quantizer merges with others.
    image = Image.open(drawn).convert("RGB")
    image = image.quantize(_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def errors(found: Interval) -> list[list[float]]:
    """The interval in matplotlib's form: [[below], [above]]."""
    low = found.value if found.low is None else found.low
    high = found.value if found.high is None else found.high
    return [[max(0.0, found.value - low)], [max(0.0, high - found.value)]]


def face(found: Interval, colour: str, neutral: float = 1.0) -> str:
    """The fill colour of a point: white, for a hollow point, if the interval includes the neutral value."""
    hollow = found.low is not None and found.high is not None and found.low <= neutral <= found.high
    return "white" if hollow else colour


def draw_ratio(axes: Axes, place: float, found: Interval, colour: str, *, label: str | None = None) -> None:
    """Draw a point with its interval on a horizontal axis; hollow if the interval includes 1."""
    axes.errorbar(
        found.value, place, xerr=errors(found), marker="o", markersize=5, color=colour,
        markerfacecolor=face(found, colour), capsize=2, linestyle="none", label=label,
    )  # fmt: skip


def offset(place: float, number: int, count: int) -> float:
    """The position of one of `count` points side by side around `place`."""
    return place + 0.8 * ((number + 0.5) / count - 0.5)


def caption(figure: Figure, part: Part, *sentences: str) -> None:
    """Add sentences below the picture, with the number of examples, the bars' meaning and a warning if unsteady."""
    count = examples(part.calls)
    bars = "Bars: 95% intervals, paired bootstrap; hollow points: the interval includes no difference."
    told = [f"{count} different example{'s' if count > 1 else ''}.", bars if count >= ENOUGH else ""]
    text = " ".join(filter(None, [*sentences, *told, unsteady(part)]))
    figure.supxlabel(_broken(text, 125), fontsize="small", color="0.25", x=0.01, ha="left")


def legend(axes: Axes, width: int = 100) -> None:
    """Add a legend between the axes and the figure's title, at most `width` characters wide."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [_broken(label, width) for label in labels]
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.3}
    axes.legend(handles, labels, **place, ncols=_columns(labels, width), fontsize="small", frameon=False)


def _columns(labels: Sequence[str], width: int) -> int:
    """The number of labels with their keys that fit side by side into `width` characters."""
    return max(1, min(len(labels), int(width / (max(map(len, labels), default=1) + 8))))


def _broken(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_long_words=False))
