"""The quality lost for speed."""

from __future__ import annotations

from matplotlib.figure import Figure

from hf_specdec.bench.figures import quality, speed
from hf_specdec.bench.figures.frames import Part
from hf_specdec.bench.models.names import short_name
from hf_specdec.bench.records import Method
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import KINDS, LINES, caption, errors, face, legend, new_figure

_CROWDED = 12  # methods
_SPAN = 4.0  # smallest range of the axis in points, so that noise doesn't look like a difference
_MARKERS = ("D", "o", "s", "^", "v")


def differs(part: Part) -> bool:
    """Whether any method's answers score differently from plain decoding's."""
    found = (quality.difference(part, method.name, "plain", "rougeL") for method in part.methods)
    return any(one is not None and (one.value or one.worse) for one in found)


def speed_against_quality(part: Part) -> Figure | None:
    """The speedup over plain generate() and the change in ROUGE-L of every method; None if no answer changes."""
    if not differs(part):
        return None
    figure, (axes,) = new_figure(4.8)
    drafts = list(dict.fromkeys(method.draft for method in part.methods if method.draft))
    named: set[str] = set()
    ends = [0.0]
    for method in part.methods:
        gain = speed.over(part, method, "plain")
        change = quality.difference(part, method.name, "plain", "rougeL")
        if gain is None or change is None:
            continue
        label, colour = _named(method, drafts)
        ends += [change.value - errors(change)[0][0], change.value + errors(change)[1][0]]
        axes.errorbar(
            change.value, gain.value, xerr=errors(change), yerr=errors(gain), color=colour,
            marker=_MARKERS[list(KINDS).index(method.kind) % len(_MARKERS)], markersize=5,
            markerfacecolor=face(change, colour, 0.0), elinewidth=0.8, capsize=2, linestyle="none",
            alpha=0.7 if len(part.methods) > _CROWDED else 1.0, label=None if label in named else label,
        )  # fmt: skip
        named.add(label)
    axes.axvline(0, color="black", linewidth=1)
    axes.axhline(1, color="black", linewidth=1)
    more = max(0.0, _SPAN - (max(ends) - min(ends))) / 2 + 0.04 * (max(ends) - min(ends))
    axes.set_xlim(min(ends) - more, max(ends) + more)
    axes.set_xlabel("ROUGE-L, difference to plain generate() (points)")
    axes.set_ylabel("Speedup over plain generate() (×)")
    figure.suptitle("Speed and quality")
    legend(axes, 120)
    caption(figure, part)
    return figure


def _named(method: Method, drafts: list[str]) -> tuple[str, str]:
    """(label, colour): by strategy and draft if there are several drafts, otherwise by method."""
    colour, words = KINDS[method.kind]
    if not method.ours:
        return capital(method.title), colour
    if len(drafts) < 2:
        return words, colour
    number = drafts.index(method.draft) if method.draft in drafts else -1
    return f"{words}, {short_name(method.draft or 'no draft')}", LINES[number % len(LINES)]
