"""Pictures of the tasks benchmark and decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import bar, colour_of, legend_below, new_figure, offset

Result = Mapping[str, Any]


def speed_by_length(result: Result) -> Figure:
    """Benchmark: tokens/s of every method at each prompt length; the bars' ends are the repeats' extremes."""
    lengths = list(dict.fromkeys(prompt["tokens"] for prompt in result["prompts"]))
    figure, axes = new_figure(2.5 + 2.5 * len(lengths), 4.5)
    gains = []
    for place, length in enumerate(lengths):
        prompts = [prompt["index"] for prompt in result["prompts"] if prompt["tokens"] == length]
        for number, method in enumerate(result["methods"]):
            runs = speed.typical_runs(result["runs"], method["name"], prompts)
            rate = speed.micro_rate(runs.values()) or 0.0
            chosen = [run for run in result["runs"] if run["prompt"] in runs]
            rates = [value for one in speed.by_repeat(chosen, method["name"]) if (value := speed.micro_rate(one))]
            label = capital(method["title"]) if place == 0 else None
            bar(axes, offset(place, number, len(result["methods"])), rate, rates, colour_of(method), label, result)
            if number == 1:
                ratio = speed.middle(speed.speedup_by_repeat(result["runs"], method["name"], "plain", prompts))
                gains.append("–" if ratio is None else f"{ratio:.2f}× at {length} tokens")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_xlabel("Prompt length (tokens)")
    axes.set_ylabel("Decoding speed (tokens/s)")
    what = capital(result["methods"][1]["title"]) if len(result["methods"]) > 1 else "Plain decoding"
    axes.set_title(f"{what} over plain: {', '.join(gains)}" if gains else what)
    legend_below(figure, axes)
    return figure
