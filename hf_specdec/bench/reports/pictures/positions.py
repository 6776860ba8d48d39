"""At which positions of a draft its tokens are accepted."""

from __future__ import annotations

from matplotlib.figure import Figure

from hf_specdec.bench.figures.frames import Part, acceptance_by_position
from hf_specdec.bench.reports.columns import drafted
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import KINDS, LINES, caption, errors, legend, new_figure, offset

FEW = 30  # drafted tokens; positions that fewer reached are drawn faded


def by_position(part: Part) -> Figure | None:
    """Share of drafted tokens accepted at each position among the rounds that reached it, with counts and intervals.

    None where no draft has two positions.
    """
    found = {method.name: acceptance_by_position(part.of(method.name)) for method in drafted(part)}
    shown = [method for method in drafted(part) if len(found[method.name]) > 1]
    if not shown:
        return None
    figure, (axes,) = new_figure(4.4)
    several = len({method.kind for method in shown}) == len(shown)
    for number, method in enumerate(shown):
        positions = found[method.name]
        colour = KINDS[method.kind][0] if several else LINES[number % len(LINES)]
        label = f"{capital(method.title)} (n = {positions[0][0]:,} … {positions[-1][0]:,})"
        for place, (reached, share) in enumerate(positions, start=1):
            axes.errorbar(
                offset(place, number, len(shown)) if len(shown) > 1 else place, share.value, yerr=errors(share),
                marker="o", markersize=4, color=colour, capsize=2, alpha=0.3 if reached < FEW else 1.0,
                label=label if place == 1 else None,
            )  # fmt: skip
    longest = max(map(len, found.values()))
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlim(0.4, longest + 0.6)
    axes.set_ylim(0, 1.03)
    axes.grid(axis="y", color="0.92")
    axes.set_xlabel("Position in the draft")
    axes.set_ylabel("Accepted share of the tokens reached")
    figure.suptitle("Acceptance by position in the draft")
    legend(axes)
    counted = "n: drafted tokens judged at the first and at the last position. Intervals are Wilson's."
    caption(figure, part, counted, f"Faded: fewer than {FEW} tokens.")
    return figure
