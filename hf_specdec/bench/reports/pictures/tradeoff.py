"""Speed against quality, of subtasks and sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.figures import quality, tradeoff
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import (
    BY_KIND,
    LINES,
    caption,
    errors,
    legend,
    new_figure,
    short_name,
    sure,
    wide_enough,
)
from hf_specdec.bench.reports.tables import methods

Result = Mapping[str, Any]
MethodDict = Mapping[str, Any]

_CROWDED = 12  # methods
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
            marker="o" if method["kind"] == "bild" else "D",
            markersize=5,
            markerfacecolor=colour if sure(change, 0.0) else "white",
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
    legend(axes)
    caption(
        figure,
        f"Bars: 95% intervals, paired bootstrap; {len(prompts)} examples.",
        "Hollow: the interval of the quality difference includes 0.",
    )
    return figure


def quality_differs(result: Result) -> bool:
    """Whether any method's answers are judged otherwise than plain decoding's."""
    plain, prompts = methods.plain_name(result), tradeoff.prompts_of(result, None)
    found = (quality.difference(result, m["name"], plain, "rougeL", prompts) for m in result["methods"])
    return any(change is not None and (change.value, change.low, change.high) != (0.0, 0.0, 0.0) for change in found)


def _named(method: MethodDict, drafts: list[str]) -> tuple[str, str]:
    """(label, colour): of a sweep by strategy and draft, elsewhere by method."""
    ours = method["kind"] in ("speculative", "bild")
    if ours and len(drafts) > 1:
        words = "BiLD" if method["kind"] == "bild" else "speculative"
        number = drafts.index(method["draft"]) if method["draft"] in drafts else -1
        return f"{capital(words)}, {short_name(method['draft'] or 'no draft')}", LINES[number % len(LINES)]
    if ours:
        return ("BiLD" if method["kind"] == "bild" else "Speculative"), BY_KIND[method["kind"]]
    return capital(method["title"]), BY_KIND[method["kind"]]
