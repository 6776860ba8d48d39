"""Speed against quality, of sweep and subtasks."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import (
    COLOURS,
    LINES,
    colour_of,
    deviation,
    legend_below,
    limits,
    new_figure,
    short_name,
)
from hf_specdec.bench.reports.tables import sweep as sweep_tables

Result = Mapping[str, Any]


def speed_against_quality(result: Result) -> Figure:
    """BiLD's settings as points; lossless methods share plain decoding's quality, a vertical line."""
    figure, axes = new_figure(7.5, 5)
    plain = rouge(result, "plain")
    axes.axvline(plain, color="black", linewidth=1, label="Quality of plain and of lossless decoding")
    axes.plot([plain], [1.0], marker="s", color=COLOURS["plain"], linestyle="none", label="Plain decoding")
    drafts = list(dict.fromkeys(method.get("draft") for method in result["methods"][1:]))
    seen = set()
    for method in result["methods"][1:]:
        ratios = speed.speedup_by_repeat(result["runs"], method["name"], "plain")
        if not ratios:
            continue
        strategy = method.get("strategy", method["name"])
        lossy = strategy == "bild"
        colour = LINES[drafts.index(method["draft"]) % len(LINES)] if "draft" in method else colour_of(method)
        label = capital(method["title"])
        if "draft" in method:
            label = f"{'BiLD' if lossy else 'Speculative'}, {short_name(method['draft'])}"
        axes.errorbar(
            rouge(result, method["name"]) if lossy else plain,
            mean(ratios),
            yerr=deviation(ratios),
            color=colour,
            marker="o" if lossy else "D",
            fillstyle="full" if lossy else "none",
            capsize=2,
            linestyle="none",
            label=None if label in seen else label,
        )
        seen.add(label)
    # At least two points wide, so that a word more or less doesn't look like a loss.
    low, high = limits([plain, *(rouge(result, m["name"]) for m in result["methods"])], 2.0)
    axes.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.set_xlabel("Quality: ROUGE-L against the references (0–100)")
    axes.set_ylabel("Speedup over plain decoding (×)")
    axes.set_title("Up is faster, right is better; left of the line BiLD has paid in quality")
    legend_below(figure, axes)
    return figure


def rouge(result: Result, name: str) -> float:
    return float(sweep_tables.quality_of(result, name)["rougeL"])
