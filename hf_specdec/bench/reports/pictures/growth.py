"""Pictures of the task growth."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import LINES, legend, new_figure
from hf_specdec.bench.reports.tables.growth import MIB, samples_of


def memory_over_calls(result: Result) -> Figure:
    """Resident memory and compiled graphs of the process over the calls."""
    figure, panels = new_figure(3.6, columns=2)
    for number, method in enumerate(result["methods"]):
        samples = samples_of(result, method["name"])
        calls = [item["calls"] for item in samples]
        style: dict[str, Any] = {"color": LINES[number % len(LINES)], "label": capital(method["title"])}
        panels[0].plot(calls, [item["resident_bytes"] / MIB for item in samples], **style)
        panels[1].step(calls, [item["graphs"] for item in samples], where="post", **style)
    for axes, label in zip(panels, ("Resident memory (MiB)", "Compiled graphs"), strict=True):
        axes.set_ylim(0, max(1.0, 1.1 * axes.get_ylim()[1]))
        axes.set_xlabel("Calls")
        axes.set_ylabel(label)
    figure.suptitle("Memory and compiled graphs over many calls")
    legend(panels[0], width=45)
    return figure
