"""What a round takes and how far drafts get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import (
    BLUE,
    COLOURS,
    LINES,
    PALE,
    SKY,
    colour_of,
    legend_below,
    new_figure,
    wrapped,
)

Result = Mapping[str, Any]

_PARTS = {"Draft": ("draft", SKY), "Verification": ("verify", BLUE), "Overhead": ("overhead", PALE)}


def time_per_round(result: Result) -> Figure:
    """Mean time of a round after the first, split into draft, verification and the rest; of methods that tell."""
    parts_of = {}
    for method in result["methods"]:
        found = speed.round_parts(run for run in result["runs"] if run["method"] == method["name"])
        if found is not None:
            parts_of[method["title"]] = found
    figure, axes = new_figure(8, 1.8 + 0.55 * len(parts_of))
    shares = []
    for place, found in enumerate(parts_of.values()):
        left = 0.0
        for part, (key, colour) in _PARTS.items():
            value = 1000 * found[key]
            axes.barh(place, value, left=left, color=colour, label=part if place == 0 else None)
            left += value
        shares.append(1000 * found["overhead"] / left)
    axes.set_yticks(range(len(parts_of)), [wrapped(title) for title in parts_of])
    axes.invert_yaxis()
    axes.set_xlabel("Mean time per round (ms)")
    axes.set_title(f"What a round costs: at most {100 * max(shares):.1f}% is neither draft nor target")
    legend_below(figure, axes)
    return figure


def acceptance_by_position(result: Result) -> Figure:
    """Share of accepted tokens at each position of a draft, among the rounds that reached it."""
    figure, axes = new_figure(7, 4.5)
    longest = 0
    for number, method in enumerate(result["methods"]):
        shares = speed.acceptance_by_position(r for r in result["runs"] if r["method"] == method["name"])
        if shares:
            longest = max(longest, len(shares))
            colour = colour_of(method) if method["name"] in COLOURS else LINES[number % len(LINES)]
            # In greedy decoding transformers' own loop accepts what ours does: drawn so that both can be seen.
            style = "x--" if method["name"] == "assisted" else "o-"
            axes.plot(range(1, len(shares) + 1), shares, style, color=colour, label=capital(method["title"]))
    axes.set_xticks(range(1, longest + 1))
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("Position in the draft (tokens)")
    axes.set_ylabel("Accepted share of the tokens reached there")
    axes.set_title("A level line: each drafted token is as good as the one before it")
    legend_below(figure, axes)
    return figure
