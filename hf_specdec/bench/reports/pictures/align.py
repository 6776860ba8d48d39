"""Pictures of the task align."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.reports.pictures.drawing import BLUE, SKY, legend, new_figure


def loss_over_steps(result: Mapping[str, Any]) -> Figure:
    """The training loss, and the loss on held-out prompts, over the steps."""
    facts, loss = result["alignment"], result["arguments"]["loss"]
    figure, (axes,) = new_figure(3.6)
    for key, name, style in (
        ("curve", "training", {"color": SKY}),
        ("held_out_curve", "held-out prompts", {"color": BLUE, "marker": "o", "markersize": 4}),
    ):
        steps, values = zip(*facts[key], strict=True)
        axes.plot(steps, values, label=name, **style)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="0.92")
    axes.set_xlabel("Training steps")
    axes.set_ylabel("Probability" if loss == "total_variation" else "Nats per token")
    figure.suptitle(f"Loss of the draft: {loss.replace('_', ' ')}")
    legend(axes)
    return figure
