"""How fast methods are on each subtask."""

from __future__ import annotations

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import Part, examples
from hf_specdec.bench.reports.columns import drafted
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import KINDS, caption, draw_ratio, legend, new_figure, offset


def by_subtask(part: Part, which: str = "plain") -> Figure:
    """The speedup of each drafting method over a baseline on each subtask, and over all."""
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
            # The baseline is the one over all examples.
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
