"""What drafting brings and what the engine brings, for any task."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.reports.markdown import capital, ratio
from hf_specdec.bench.reports.pictures.drawing import (
    BY_ENGINE,
    BY_KIND,
    caption,
    errors,
    new_figure,
    of_intervals,
    ratio_panel,
    title_of,
)
from hf_specdec.bench.reports.tables import methods
from hf_specdec.config import STRATEGIES

HOLLOW = "Bars: 95% interval, paired bootstrap over examples and repeats. Hollow points: the interval includes 1."
_PANELS = ("engine", "plain")
_STEPS = {"none": "plain", "speculative": "speculative", "bild": "BiLD"}
ENGINE_WORDS = {"eager": "eager", "static": "static cache", "compiled": "compiled"}


def gain_by_method(result: Result, batch: int | None = None) -> Figure:
    """The speedups of every method over plain decoding on the same engine and over plain generate(), sorted."""
    shown = [m for m in methods.shown_methods(result, batch=batch) if _gains(result, m, batch)]
    shown.sort(key=lambda method: -_gains(result, method, batch)["plain"].value)
    figure, panels = new_figure(1.4 + 0.36 * len(shown), columns=2, sharey=True, explain=shown)
    for axes, which in zip(panels, _PANELS, strict=True):
        rows = [(title_of(m), _gains(result, m, batch).get(which), BY_KIND[m["kind"]]) for m in shown]
        ratio_panel(axes, rows)
        axes.set_xlabel(f"Speedup over {speed.BASELINES[which]} (×)", fontsize="small")
        axes.tick_params(axis="y", labelsize="small")
    figure.suptitle(f"Decoding speed by method{_at(batch)}")
    caption(figure, of_intervals(result, HOLLOW, batch))
    return figure


def waterfall(result: Result, batch: int | None = None) -> Figure:
    """Tokens/s of plain generate(), and of plain and drafting decoding on each engine, each with its gain."""
    steps = _waterfall_steps(result, batch)
    figure, (axes,) = new_figure(3.9)
    rates = []
    for place, (method, base, words) in enumerate(steps):
        found = speed.rate_interval(result, speed.calls_of(result, method["name"], batch=batch))
        if found is None:
            continue
        rates.append(found.high if found.high is not None else found.value)
        drafting = method["draft"] is not None or speed.drafts_in_our_loop(method)
        colour = BY_ENGINE[method["engine"]]
        axes.bar(place, found.value, 0.62, yerr=errors(found), capsize=3, color=colour, alpha=1.0 if drafting else 0.55)
        gain = None if base is None else speed.speedup(result, method["name"], base["name"], batch=batch)
        text = f"{found.value:.0f} tokens/s" if gain is None else f"{ratio(gain)} ×\n{words}"
        axes.annotate(text, (place, rates[-1]), (0, 4), textcoords="offset points", ha="center", fontsize="small")
    axes.set_xticks(range(len(steps)), [_step_name(method) for method, *_ in steps])
    axes.set_ylim(0, 1.28 * max(rates, default=1.0))
    axes.set_xlabel("Method and engine")
    axes.set_ylabel("Decoding speed (tokens/s)")
    figure.suptitle(f"Decoding speed by engine, without and with a draft{_at(batch)}")
    bars = of_intervals(result, "Bars: 95% interval, paired bootstrap.", batch)
    caption(figure, *_drafting_gains(result, steps, batch), bars)
    return figure


def best_on(result: Result, engine: str, batch: int | None) -> MethodDict | None:
    """The fastest drafting method on one of this package's engines."""
    return speed.fastest(result, batch=batch, kind=STRATEGIES, engine=engine)


def _gains(result: Result, method: MethodDict, batch: int | None) -> dict[str, speed.Ratio]:
    found = {which: methods.over(result, method, which, batch=batch) for which in _PANELS}
    return {which: gain for which, gain in found.items() if gain is not None}


def _waterfall_steps(result: Result, batch: int | None) -> list[tuple[MethodDict, MethodDict | None, str]]:
    """(method, its baseline, the baseline in words), from plain generate() to the fastest engine."""
    plain = next(m for m in result["methods"] if m["kind"] == "plain")
    steps: list[tuple[MethodDict, MethodDict | None, str]] = [(plain, None, "")]
    before: tuple[MethodDict, str] = plain, "plain generate()"
    for engine in dict.fromkeys(m["engine"] for m in result["methods"] if m["kind"] == "none"):
        base = speed.fastest(result, batch=batch, kind="none", engine=engine)
        best = best_on(result, engine, batch)
        if base is not None:
            steps.append((base, before[0], f"over {before[1]}"))
            before = base, f"plain, {ENGINE_WORDS[engine]}"
        if best is not None and base is not None:
            steps.append((best, base, f"over {before[1]}"))
    return steps


def _drafting_gains(
    result: Result, steps: Sequence[tuple[MethodDict, MethodDict | None, str]], batch: int | None
) -> list[str]:
    """A sentence for each engine on which the interval shows a gain or a loss."""
    lines = []
    for method, base, _ in steps:
        if base is None or method["kind"] == "none":
            continue
        gain = speed.speedup(result, method["name"], base["name"], batch=batch)
        if gain is not None and (gain.faster or gain.slower):
            where = capital(ENGINE_WORDS[method["engine"]])
            lines.append(f"{where}: drafting decodes at {ratio(gain)} times the speed of plain decoding.")
    return lines


def _step_name(method: MethodDict) -> str:
    if method["kind"] == "plain":
        return "plain\ngenerate()"
    return f"{_STEPS[method['kind']]},\n{ENGINE_WORDS[method['engine']]}"


def _at(batch: int | None) -> str:
    return "" if batch is None else f", batch size {batch}"
