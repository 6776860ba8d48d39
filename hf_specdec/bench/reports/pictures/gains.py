"""The gain from the engine and the gain from drafting, overall and on each subtask."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import Part, examples
from hf_specdec.bench.records import Interval, Method
from hf_specdec.bench.reports.columns import drafted
from hf_specdec.bench.reports.markdown import capital, ratio
from hf_specdec.bench.reports.pictures.drawing import (
    ENGINES,
    KINDS,
    caption,
    draw_ratio,
    errors,
    legend,
    new_figure,
    offset,
)

_DRAFTS = {"none": "plain", "speculative": "speculative", "bild": "BiLD"}
_MOST = 3  # most batch sizes side by side

Step = tuple[Method, "Method | None"]


def by_engine(part: Part) -> Figure:
    """Tokens/s of plain generate(), and on each engine without and with a draft; a panel per batch size."""
    sizes = part.batch_sizes[:_MOST]
    figure, panels = new_figure(3.9, columns=len(sizes))
    for axes, batch in zip(panels, sizes, strict=True):
        here = part.where(batch=batch)
        _bars(axes, here, steps(here), narrow=len(sizes) > 1)
        axes.set_xlabel("Method and engine" if len(part.batch_sizes) == 1 else f"Batch size {batch}")
    panels[0].set_ylabel("Decoding speed (tokens/s)")
    figure.suptitle("Decoding speed by engine, without and with a draft")
    caption(
        figure, part, "Above each bar: how many times the speed of plain generate(), or with a draft of the bar before."
    )
    return figure


def steps(part: Part) -> list[Step]:
    """Each bar's method and its baseline: plain generate(), then each engine without and with a draft."""
    plain = speed.fastest(part, [method for method in part.methods if method.kind == "plain"])
    found: list[Step] = [] if plain is None else [(plain, None)]
    for engine in speed.engines_of(part):
        base = speed.fastest(part, [m for m in part.methods if (m.kind, m.engine) == ("none", engine)])
        best = speed.fastest(part, speed.drafting(part, engine))
        found += [] if base is None else [(base, plain)]
        found += [] if best is None or base is None else [(best, base)]
    return found


def _bars(axes: Axes, part: Part, bars: Sequence[Step], *, narrow: bool) -> None:
    tops = [1.0]
    for place, (method, base) in enumerate(bars):
        found = speed.rate_interval(part.of(method.name))
        assert found is not None, "it is the fastest of its kind"
        tops.append(found.value if found.high is None else found.high)
        solid = 1.0 if method.draft else 0.55
        axes.bar(place, found.value, 0.7, yerr=errors(found), capsize=3, color=ENGINES[method.engine], alpha=solid)
        gain = None if base is None else speed.speedup(part, method.name, base.name)
        text = f"{found.value:.0f}\ntokens/s" if gain is None else _short(gain) if narrow else f"{ratio(gain)} ×"
        axes.annotate(text, (place, tops[-1]), (0, 4), textcoords="offset points", ha="center", fontsize="small")
    names = [_name(method) for method, _ in bars]
    axes.set_xticks(range(len(bars)), names, fontsize="small", rotation=90 if narrow else 0)
    axes.set_ylim(0, 1.28 * max(tops))


def _short(gain: Interval) -> str:
    return f"{gain.value:.2f} ×"


def _name(method: Method) -> str:
    if method.kind == "plain":
        return "plain\ngenerate()"
    return f"{_DRAFTS.get(method.kind, method.kind)},\n{method.engine}"


def by_subtask(part: Part, which: str = "plain") -> Figure:
    """The speedup of each drafting method over a baseline on each subtask and overall."""
    labels: list[str | None] = [*part.labels, None]
    shown = [method for method in drafted(part) if speed.baseline(part, method, which)]
    figure, (axes,) = new_figure(1.6 + 0.13 * len(labels) * max(2, len(shown)))
    names = []
    for place, label in enumerate(labels):
        here = part.where(label=label)
        names.append(f"{(label or 'all').replace('_', ' ')} ({examples(here.calls)})")
        if place % 2:
            axes.axhspan(place - 0.5, place + 0.5, color="0.96", zorder=0)
        for number, method in enumerate(shown):
            # The same baseline on every subtask: the fastest over all examples.
            base = speed.baseline(part, method, which)
            gain = None if base is None else speed.speedup(here, method.name, base.name)
            if gain is not None:
                named = capital(method.title) if label is None else None
                draw_ratio(axes, offset(place, number, len(shown)), gain, KINDS[method.kind][0], label=named)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(labels)), names)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(f"Speedup over {speed.BASELINES[which]} (×)")
    figure.suptitle("Decoding speed by subtask (different examples in brackets)")
    legend(axes)
    caption(figure, part)
    return figure
