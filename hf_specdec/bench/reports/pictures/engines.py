"""Pictures of the task engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hf_specdec.bench.figures import engine_speed
from hf_specdec.bench.figures.engine_speed import DRAFTING, fastest, rate, runs_of, typical_rate
from hf_specdec.bench.reports.markdown import capital
from hf_specdec.bench.reports.pictures.drawing import COLOURS

Result = Mapping[str, Any]

_WORDS = {
    "plain": "transformers: plain generate()",
    "assisted": "transformers: assisted generation",
    "eager": "ours, eager",
    "static": "ours, static cache",
    "compiled": "ours, compiled",
}


def speed_by_method(result: Result) -> Figure:
    """Tokens/s of every method at the smallest batch size; a bar's ends are the extremes of the repeats."""
    batch = min(run["batch"] for run in result["runs"])
    shown = [m for m in result["methods"] if runs_of(result, m["name"], batch)]
    figure = Figure(figsize=(9, 1.6 + 0.28 * len(shown)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    for place, method in enumerate(shown):
        speed, low, high = _speed(result, method["name"], batch)
        ends = [[speed - low], [high - speed]]
        axes.barh(place, speed, xerr=ends, color=COLOURS[_group(method)], capsize=2, error_kw={"linewidth": 1})
        axes.text(high, place, f"  {speed:.0f}", va="center", fontsize="small")
    axes.set_yticks(range(len(shown)), [_short(method["title"]) for method in shown], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("Decoding speed (tokens/s)")
    axes.set_title(_headline(result, batch))
    groups = dict.fromkeys(_group(method) for method in shown)
    handles = [Patch(color=COLOURS[group], label=_WORDS[group]) for group in groups]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def speed_by_batch(result: Result) -> Figure:
    """Tokens/s over the batch size: plain decoding dashed, the fastest with a draft solid, on each engine."""
    batches = sorted({run["batch"] for run in result["runs"]})
    figure = Figure(figsize=(7.5, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    engines = list(dict.fromkeys(m["engine"] for m in result["methods"]))
    lines: list[tuple[str, str, str, dict[str, Any]]] = [
        ("plain generate()", COLOURS["plain"], "s--", {"kind": "plain"}),
        ("transformers' assisted, best setting", COLOURS["assisted"], "D", {"kind": "assisted"}),
    ]
    for engine in engines:
        lines.append((f"ours without a draft, {engine}", COLOURS[engine], "o--", {"kind": "none", "engine": engine}))
        ours = {"kind": DRAFTING, "engine": engine}
        lines.append((f"ours, fastest with a draft, {engine}", COLOURS[engine], "o-", ours))
    for label, colour, style, facts in lines:
        points = [(batch, found) for batch in batches if (found := fastest(result, batch, **facts)) is not None]
        speeds = [typical_rate(runs_of(result, method["name"], batch)) or 0.0 for batch, method in points]
        if points:
            axes.plot([batch for batch, _ in points], speeds, style, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("Batch size (rows)")
    axes.set_ylabel("Decoding speed (tokens/s, all rows)")
    ends = {engine: engine_speed.break_even(result, engine) for engine in engines}
    paying = ", ".join(f"{engine} {'throughout' if end is None else f'below {end}'}" for engine, end in ends.items())
    axes.set_title(f"Where a draft pays over plain decoding: {paying}")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    return figure


def _speed(result: Result, name: str, batch: int) -> tuple[float, float, float]:
    """The median of the repeats' rates, and their extremes."""
    runs = runs_of(result, name, batch)
    repeats = {run["repeat"] for run in runs}
    rates = [rate(run for run in runs if run["repeat"] == repeat) or 0.0 for repeat in repeats]
    return typical_rate(runs) or 0.0, min(rates), max(rates)


def _headline(result: Result, batch: int) -> str:
    plain, parts = runs_of(result, "plain", batch), []
    for words, facts in (("transformers' best", {"kind": "assisted"}), ("ours", {"kind": DRAFTING})):
        best = fastest(result, batch, **facts)
        gain = None if best is None else engine_speed.ratio(runs_of(result, best["name"], batch), plain)
        if gain is not None:
            parts.append(f"{words} {gain.middle:.2f}×")
    return f"Over plain generate() at batch size {batch}: {', '.join(parts)}"


def _group(method: Mapping[str, Any]) -> str:
    return str(method["kind"] if method["kind"] in ("plain", "assisted") else method["engine"])


def _short(title: str) -> str:
    return capital(title.replace("transformers' assisted generation", "assisted"))
