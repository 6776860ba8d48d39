"""How long drafts should be: speed by lookahead, acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_specdec.bench.figures import passes, speed
from hf_specdec.bench.figures.frames import Part, acceptance_by_position
from hf_specdec.bench.models.names import short_name
from hf_specdec.bench.records import Method
from hf_specdec.bench.reports.columns import drafted
from hf_specdec.bench.reports.markdown import capital, size
from hf_specdec.bench.reports.pictures.drawing import KINDS, LINES, caption, errors, legend, new_figure, offset

_ENOUGH = 3  # the fewest points for a line
FEW = 30  # drafted tokens; positions reached by fewer are drawn faded


def lookaheads(part: Part) -> list[int]:
    """The fixed lookaheads of speculative decoding, ascending."""
    return sorted({m.lookahead for m in _speculative(part) if isinstance(m.lookahead, int)})


def by_lookahead(part: Part) -> Figure | None:
    """The speedup over plain decoding on the same engine by lookahead, measured and predicted; `auto` at the right.

    Squares mark drafts with the entropy stop. None for fewer than three lookaheads.
    """
    rows, numbers = _speculative(part), lookaheads(part)
    if len(numbers) < _ENOUGH:
        return None
    figure, (axes,) = new_figure(4.4)
    auto_at = numbers[-1] + 1.2
    series = list(dict.fromkeys(map(_series, rows)))
    for number, one in enumerate(series):
        colour, shift = LINES[number % len(LINES)], 0.12 * (number - (len(series) - 1) / 2)
        mine = [method for method in rows if _series(method) == one]
        fixed = sorted((m for m in mine if isinstance(m.lookahead, int) and not _stops(m)), key=_lookahead)
        places = {m.name: (auto_at if m.lookahead == "auto" else _lookahead(m)) + shift for m in mine}
        label = _label(mine[0], several_engines=len({method.engine for method in rows}) > 1)
        _points(axes, part, [(places[m.name], m) for m in fixed], colour, label)
        _points(axes, part, [(places[m.name], m) for m in mine if m not in fixed and not _stops(m)], colour)
        _points(axes, part, [(places[m.name] + 0.36, m) for m in mine if _stops(m)], colour, marker="s")
        predicted = [(_lookahead(m), value) for m in fixed if (value := passes.predicted(part, m)) is not None]
        axes.plot([x for x, _ in predicted], [y for _, y in predicted], ":", color=colour)
    axes.plot([], [], ":", color="0.4", label="predicted from α, c and v")
    if any(map(_stops, rows)):
        axes.plot([], [], "s", color="0.4", markersize=4, label="with the entropy stop")
    axes.axhline(1, color="black", linewidth=1)
    auto = [auto_at] if any(method.lookahead == "auto" for method in rows) else []
    axes.set_xticks([*numbers, *auto], [*map(str, numbers), *("auto" for _ in auto)])
    axes.set_xlabel("Lookahead (draft tokens per round)")
    axes.set_ylabel("Speedup over plain, same engine (×)")
    figure.suptitle("Speedup by draft and lookahead")
    legend(axes)
    caption(figure, part)
    return figure


def _speculative(part: Part) -> list[Method]:
    return [method for method in part.methods if method.kind == "speculative" and method.draft]


def _series(method: Method) -> tuple[str | None, str, str]:
    """What the methods of a line share: draft, drafter and engine."""
    return method.draft, str(method.keywords.get("drafter", "model")), method.engine


def _label(method: Method, *, several_engines: bool) -> str:
    draft, drafter, engine = _series(method)
    words = [f"{short_name(draft or 'none')} ({size(method.draft_parameters)})"]
    words += [f"drafter {drafter}"] if drafter != "model" else []
    return ", ".join([*words, engine] if several_engines else words)


def _lookahead(method: Method) -> int:
    return method.lookahead if isinstance(method.lookahead, int) else 0


def _stops(method: Method) -> bool:
    return "entropy_threshold" in method.keywords


def _points(
    axes: Axes,
    part: Part,
    places: Sequence[tuple[float, Method]],
    colour: str,
    label: str | None = None,
    marker: str = "o",
) -> None:
    """Draw points with their intervals, joined by a line if they have a label."""
    found = [(x, gain) for x, method in places if (gain := speed.over(part, method, "engine")) is not None]
    for x, gain in found:
        axes.errorbar(x, gain.value, yerr=errors(gain), color=colour, marker=marker, markersize=4, capsize=2)
    if label:
        axes.plot([x for x, _ in found], [gain.value for _, gain in found], "-", color=colour, label=label)


def by_position(part: Part) -> Figure | None:
    """Share of drafted tokens accepted at each position among the rounds that reached it, with counts and intervals.

    None if no draft has two positions.
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
