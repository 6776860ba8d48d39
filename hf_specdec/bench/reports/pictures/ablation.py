"""Pictures of the task ablation."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed
from hf_specdec.bench.reports.pictures.drawing import COLOURS, deviation, new_figure, offset

Result = Mapping[str, Any]


def ablation_bars(result: Result) -> Figure:
    """Ablation: tokens/s of all eight rows; bars are standard deviations."""
    figure, axes = new_figure(7.5, 4.5)
    places = {(False, False): 0, (False, True): 1, (True, False): 2, (True, True): 3}
    for method in result["methods"]:
        repeats = speed.by_repeat(result["runs"], method["name"])
        rates = [rate for one in repeats if (rate := speed.micro_rate(one)) is not None]
        place = places[method["cache"], method["better_transformer"]]
        kind = "speculative" if method["speculative"] else "plain"
        label = {"speculative": "With a draft", "plain": "Plain decoding"}[kind] if place == 0 else None
        height = mean(rates) if rates else 0.0
        at = offset(place, int(method["speculative"]), 2)
        axes.bar(at, height, width=0.38, yerr=deviation(rates) or None, capsize=3, color=COLOURS[kind], label=label)
    names = ["no cache\neager", "no cache\nBetter Transformer", "KV cache\neager", "KV cache\nBetter Transformer"]
    axes.set_xticks(range(4), names)
    axes.set_xlabel("Cache and attention")
    axes.set_ylabel("Decoding speed (tokens/s)")
    axes.set_title("What speculation brings with and without cache and fast attention")
    axes.legend()
    return figure
