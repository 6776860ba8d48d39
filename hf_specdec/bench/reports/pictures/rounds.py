"""How long a round takes, and at which positions drafts are accepted."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.figures import rounds, speed
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import (
    BLUE,
    BY_KIND,
    LINES,
    PALE,
    SKY,
    caption,
    legend,
    new_figure,
    offset,
    title_of,
)

_PARTS = {"Draft": ("draft", SKY), "Verification": ("verify", BLUE), "Rest": ("overhead", PALE)}
FEW = 30  # drafted tokens; positions that fewer reached are drawn faded


def time_per_round(result: Result) -> Figure:
    """Mean time of a round after the first, by part, for methods that report it."""
    found = [(m, parts) for m in timed_methods(result) if (parts := rounds.time_per_round(_calls(result, m)))]
    found.sort(key=lambda item: sum(item[1][key] for key, _ in _PARTS.values()))
    figure, (axes,) = new_figure(1.5 + 0.5 * len(found))
    for place, (_, parts) in enumerate(found):
        left = 0.0
        for name, (key, colour) in _PARTS.items():
            value = 1000 * parts[key]
            axes.barh(place, value, 0.6, left=left, color=colour, label=name if place == 0 else None)
            left += value
        axes.text(left, place, f"  {left:.2f} ms", va="center", fontsize="small")
    axes.set_yticks(range(len(found)), [title_of(method) for method, _ in found], fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("Mean time per round (ms)")
    figure.suptitle("Time of a round: draft, verification and the rest")
    legend(axes)
    return figure


def acceptance_by_position(result: Result) -> Figure:
    """Share of drafted tokens accepted at each position among the rounds that reached it, with counts and intervals."""
    shown = [
        m for m in result["methods"] if len(rounds.acceptance_by_position(speed.distinct_calls(result, m["name"]))) > 1
    ]
    figure, (axes,) = new_figure(4.6)
    longest = 0
    by_kind = len({method["kind"] for method in shown}) == len(shown)
    for number, method in enumerate(shown):
        positions = rounds.acceptance_by_position(speed.distinct_calls(result, method["name"]))
        longest = max(longest, len(positions))
        colour = BY_KIND[method["kind"]] if by_kind else LINES[number % len(LINES)]
        for place, position in enumerate(positions, start=1):
            faded = position.reached < FEW
            at = offset(place, number, len(shown)) if len(shown) > 1 else place
            ends = [[position.share - position.low], [position.high - position.share]]
            axes.errorbar(
                at,
                position.share,
                yerr=ends,
                marker="o",
                markersize=4,
                color=colour,
                alpha=0.3 if faded else 1.0,
                capsize=2,
                label=_counted(method, positions) if place == 1 else None,
            )
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlim(0.4, longest + 0.6)
    axes.set_ylim(0, 1.03)
    axes.grid(axis="y", color="0.92")
    axes.set_xlabel("Position in the draft")
    axes.set_ylabel("Accepted share of the tokens reached")
    figure.suptitle("Acceptance by position in the draft")
    legend(axes)
    caption(
        figure,
        "n: drafted tokens judged at the first and at the last position. Bars: 95% Wilson interval.",
        f"Faded: fewer than {FEW} tokens.",
    )
    return figure


def timed_methods(result: Result) -> list[MethodDict]:
    """The methods that report the times of their rounds."""
    return [m for m in result["methods"] if m["kind"] != "none" and rounds.time_per_round(_calls(result, m))]


def drafting(result: Result) -> bool:
    """Whether any draft has two positions or more."""
    return any(
        len(rounds.acceptance_by_position(speed.distinct_calls(result, m["name"]))) > 1 for m in result["methods"]
    )


def _calls(result: Result, method: MethodDict) -> list[Any]:
    return speed.calls_of(result, method["name"])


def _counted(method: MethodDict, positions: list[Any]) -> str:
    return f"{capital(method['title'])} (n = {positions[0].reached:,} … {positions[-1].reached:,})"
