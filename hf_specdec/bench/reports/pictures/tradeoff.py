"""Speed against quality in subtasks and sweep: all methods, and the lossy strategies by subtask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_specdec.bench.figures import quality, speed, tradeoff
from hf_specdec.bench.figures.bootstrap import Interval
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.models.known_pairs import short_name
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import (
    BY_KIND,
    DPI,
    LINES,
    WIDTH,
    caption,
    errors,
    face,
    legend,
    new_figure,
    of_intervals,
    wide_enough,
)
from hf_specdec.bench.reports.tables import methods
from hf_specdec.bench.running.methods import STRATEGY_TITLES
from hf_specdec.config import LOSSY_STRATEGIES

_CROWDED = 12  # methods
_COLUMNS = 3  # of panels, one a subtask
_MARKERS = dict(zip(LOSSY_STRATEGIES, "os^v", strict=True))
_SPAN = 4.0  # points of ROUGE-L that the axis shows at least


def speed_against_quality(result: Result) -> Figure:
    """The speedup over plain generate() and the change in ROUGE-L of every method, both as measured."""
    plain, prompts = methods.plain_name(result), tradeoff.prompts_of(result, None)
    figure, (axes,) = new_figure(5.0)
    drafts = list(dict.fromkeys(method["draft"] for method in result["methods"] if method["draft"]))
    named: set[str] = set()
    ends = [0.0]
    crowded = len(result["methods"]) > _CROWDED
    for method in result["methods"]:
        gain = methods.over(result, method, "plain")
        change = quality.difference(result, method["name"], plain, "rougeL", prompts)
        if gain is None or change is None:
            continue
        label, colour = _named(method, drafts)
        x_errors = errors(change)
        ends += [change.value - x_errors[0][0], change.value + x_errors[1][0]]
        axes.errorbar(
            change.value,
            gain.value,
            xerr=x_errors,
            yerr=errors(gain),
            color=colour,
            marker=_MARKERS.get(method["kind"], "D"),
            markersize=5,
            markerfacecolor=face(change, colour, 0.0),
            elinewidth=0.8,
            alpha=0.7 if crowded else 1.0,
            capsize=2,
            linestyle="none",
            label=None if label in named else label,
        )
        named.add(label)
    axes.axvline(0, color="black", linewidth=1)
    axes.axhline(1, color="black", linewidth=1)
    low, high = wide_enough(ends, _SPAN)
    axes.set_xlim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    axes.set_xlabel("ROUGE-L, difference to plain generate() (points)")
    axes.set_ylabel("Speedup over plain generate() (×)")
    figure.suptitle("Speed and quality")
    legend(axes, 120)
    bars = of_intervals(result, f"Bars: 95% intervals, paired bootstrap; {len(prompts)} examples.")
    caption(figure, bars, of_intervals(result, "Hollow: the interval of the quality difference includes 0."))
    return figure


def lossy_curves(result: Result, draft: str) -> Figure:
    """Speed over lossless speculation and change in quality of every lossy strategy: over all, and by subtask."""
    labels = tradeoff.labels(result)
    panels: list[str | None] = [None, *(labels if len(labels) > 1 else [])]
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(WIDTH, 1.6 + 2.3 * rows), dpi=DPI, layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(0.6, 2.3 * rows))
    above, below = halves
    grid = below.subplots(rows, min(_COLUMNS, len(panels)), squeeze=False)
    curves = _curves(result, draft)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, label in zip(grid.flat, panels, strict=False):
        _draw_curves(axes, result, curves, label)
    handles, names = grid[0][0].get_legend_handles_labels()
    above.legend(handles, names, loc="center", ncols=3, fontsize="small", frameon=False)
    below.supylabel("Facts, difference to lossless decoding (points)", fontsize="medium")
    decoding = f"T = {result['arguments']['temperature']:g}" if result["sampling"] else "greedy"
    figure.suptitle(f"Lossy strategies: {short_name(draft)}, {decoding}")
    caption(
        figure,
        "Across: decoding speed over lossless speculation (×). All at their fastest lookaheads.",
        of_intervals(result, "Bars: 95% intervals, paired bootstrap."),
    )
    return figure


def _curves(result: Result, draft: str) -> dict[tuple[str, float | None], list[MethodDict]]:
    """The lossy methods by strategy, each setting at its fastest lookahead; BiLD's by fallback threshold too."""
    found: dict[tuple[str, float | None], list[MethodDict]] = {}
    mine = [method for method in tradeoff.lossy_methods(result) if method["draft"] == draft]
    for method in tradeoff.at_fastest_lookahead(result, mine):
        found.setdefault((method["kind"], method["keywords"].get("fallback_threshold")), []).append(method)
    return found


def _draw_curves(axes: Axes, result: Result, curves: Mapping[Any, Sequence[MethodDict]], label: str | None) -> None:
    prompts = tradeoff.prompts_of(result, label)
    styles: dict[str, int] = {}
    for (kind, fallback), rows in curves.items():
        points = [point for method in rows if (point := _point(result, method, prompts)) is not None]
        style = styles[kind] = styles.get(kind, -1) + 1
        words = capital(STRATEGY_TITLES[kind]) + ("" if fallback is None else f", fallback {fallback:g}")
        look: dict[str, Any] = {"color": BY_KIND[kind], "linestyle": ("-", "--", ":", "-.")[style % 4], "linewidth": 1}
        axes.plot(
            [x.value for x, _ in points], [y.value for _, y in points], marker="o", markersize=3, label=words, **look
        )
        for x, y in points:
            axes.errorbar(
                x.value, y.value, xerr=errors(x), yerr=errors(y), color=BY_KIND[kind], elinewidth=0.6, alpha=0.5
            )
    lossless: dict[str, Any] = {"color": BY_KIND["speculative"], "markerfacecolor": "none", "linestyle": "none"}
    axes.plot([1], [0], marker="D", markersize=8, label="Lossless speculation", **lossless)
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(1, color="0.8", linewidth=0.8, zorder=0)
    low, high = wide_enough(axes.get_ylim(), _SPAN)
    axes.set_ylim(low, high)
    axes.set_title("All" if label is None else label, fontsize="small")
    axes.tick_params(labelsize="x-small")
    axes.spines[["top", "right"]].set_visible(False)


def _point(result: Result, method: MethodDict, prompts: list[int]) -> tuple[Interval, Interval] | None:
    gain, change = tradeoff.gain(result, method, prompts), tradeoff.change(result, method["name"], prompts)
    return None if gain is None or change is None else (gain, change)


def quality_differs(result: Result) -> bool:
    """Whether any method's answers have another score than plain decoding's."""
    plain, prompts = methods.plain_name(result), tradeoff.prompts_of(result, None)
    found = (quality.difference(result, m["name"], plain, "rougeL", prompts) for m in result["methods"])
    return any(change is not None and (change.value, change.low, change.high) != (0.0, 0.0, 0.0) for change in found)


def _named(method: MethodDict, drafts: list[str]) -> tuple[str, str]:
    """(label, colour): in a sweep by strategy and draft, otherwise by method."""
    ours = speed.drafts_in_our_loop(method)
    words = "speculative" if method["kind"] == "speculative" else STRATEGY_TITLES.get(method["kind"], "")
    if ours and len(drafts) > 1:
        number = drafts.index(method["draft"]) if method["draft"] in drafts else -1
        return f"{capital(words)}, {short_name(method['draft'] or 'no draft')}", LINES[number % len(LINES)]
    if ours:
        return capital(words), BY_KIND[method["kind"]]
    return capital(method["title"]), BY_KIND[method["kind"]]
