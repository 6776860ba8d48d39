"""What all pictures share: colours, sizes, intervals and captions."""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import Interval
from hf_specdec.bench.figures.result import Result
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
KIND_NAMES = {
    "plain": "Plain generate()",
    "none": "Plain on our loop",
    "assisted": "Transformers' assisted",
    "ensemble": "Transformers' ensemble",
    "lookup": "Transformers' prompt lookup",
    "speculative": "Speculative",
    "bild": "BiLD",
    "lenient": "Lenient",
    "typical": "Typical acceptance",
    "llama.cpp": "llama.cpp",
}
BY_ENGINE = {"generate": GREY, "eager": SKY, "static": ORANGE, "compiled": BLUE}
LINES = (BLUE, VERMILION, ORANGE, SKY, PURPLE, GREEN, GREY, BLACK)

# Names come from data sets, where a dollar sign begins no formula.
matplotlib.rcParams["text.parse_math"] = False

WIDTH = 8.0  # inches; GitHub shows a page about 840 pixels wide
DPI = 105
_LEGEND_ROW = 0.25  # inches
_COLOURS = 128  # of a PNG: a third of the bytes of all colours


def new_figure(
    height: float, columns: int = 1, *, sharey: bool = False, explain: Iterable[Mapping[str, Any]] = ()
) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a page with axes side by side.

    Args:
        height: of what lies between title and caption, with these, in inches.
        explain: methods the colours of whose kinds a legend above the axes explains; it adds to the height.
    """
    kinds = sorted({method["kind"] for method in explain}, key=list(BY_KIND).index)
    across = _columns([KIND_NAMES[kind] for kind in kinds], 125)
    room = _LEGEND_ROW * -(-len(kinds) // across)
    figure = Figure(figsize=(WIDTH, height + room), dpi=DPI, layout="constrained")
    below: Any = figure
    if kinds:
        parts: Any = figure.subfigures(2, 1, height_ratios=(room, height))
        above, below = parts
        handles = [Line2D([], [], color=BY_KIND[kind], marker="o", linestyle="none") for kind in kinds]
        names = [KIND_NAMES[kind] for kind in kinds]
        above.legend(handles, names, loc="center", ncols=across, fontsize="small", frameon=False)
    grid = below.subplots(1, columns, sharey=sharey, squeeze=False)
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
    return found.low is not None and not _includes(found, neutral)


def face(found: Interval, colour: str, neutral: float = 1.0) -> str:
    """The colour inside a point: white, which makes it hollow, if the interval includes the neutral value."""
    return "white" if _includes(found, neutral) else colour


def _includes(found: Interval, value: float) -> bool:
    return found.low is not None and found.high is not None and found.low <= value <= found.high


def draw_ratio(axes: Axes, place: float, found: Interval, colour: str, *, label: str | None = None) -> None:
    """A point with its interval on a horizontal axis; hollow where the interval includes 1."""
    axes.errorbar(
        found.value,
        place,
        xerr=errors(found),
        marker="o",
        markersize=5,
        color=colour,
        markerfacecolor=face(found, colour),
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


def of_intervals(result: Result, sentence: str, batch: int | None = None) -> str | None:
    """A sentence on intervals; None where each method was called once, which leaves nothing to draw them from."""
    calls = Counter((call.method, call.batch) for call in speed.calls_of(result, batch=batch))
    return sentence if any(count > 1 for count in calls.values()) else None


def legend(axes: Axes, width: int = 100) -> None:
    """Between the axes and the figure's title, at most so many characters wide."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [_broken(label, width) for label in labels]
    columns = _columns(labels, width)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.3}
    axes.legend(handles, labels, **place, ncols=columns, fontsize="small", frameon=False)


def _columns(labels: Sequence[str], width: int) -> int:
    """How many labels, with what they explain, stand side by side in so many characters."""
    return max(1, min(len(labels), int(width / (max(map(len, labels), default=1) + 8))))


def title_of(method: Mapping[str, Any], width: int = 50) -> str:
    """A method's title for an axis, on several lines."""
    return _broken(capital(method["title"]), width)


def _broken(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_long_words=False))
