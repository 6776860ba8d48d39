"""Pictures of the task engines."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.figures.speed import batch_sizes
from hf_specdec.bench.reports.markdown import approximate
from hf_specdec.bench.reports.pictures.drawing import (
    BY_ENGINE,
    caption,
    errors,
    face,
    legend,
    new_figure,
    of_intervals,
)
from hf_specdec.bench.reports.pictures.gains import ENGINE_WORDS, HOLLOW, best_on
from hf_specdec.bench.reports.tables import methods
from hf_specdec.bench.reports.tables.engines import engines_of

_TOKENS = [10 ** (power / 8) for power in range(41)]


def gain_by_batch(result: Result) -> Figure:
    """The speedup of the fastest draft setting over plain decoding on the same engine, by batch size."""
    figure, (axes,) = new_figure(4.2)
    engines = engines_of(result)
    for number, engine in enumerate(engines):
        shift = 1 + 0.05 * (number - (len(engines) - 1) / 2)
        found = []
        for batch in batch_sizes(result):
            best = best_on(result, engine, batch)
            gain = None if best is None else methods.over(result, best, "engine", batch=batch)
            if gain is not None:
                found.append((batch * shift, gain))
        colour = BY_ENGINE[engine]
        axes.plot(
            [x for x, _ in found],
            [gain.value for _, gain in found],
            "-",
            color=colour,
            label=ENGINE_WORDS[engine],
        )
        for x, gain in found:
            inside = face(gain, colour)
            style: dict[str, Any] = {"marker": "o", "markersize": 5, "capsize": 2, "markerfacecolor": inside}
            axes.errorbar(x, gain.value, yerr=errors(gain), color=colour, **style)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batch_sizes(result), [str(batch) for batch in batch_sizes(result)])
    axes.set_xlabel("Batch size (rows)")
    axes.set_ylabel("Speedup over plain, same engine (×)")
    figure.suptitle("Gain of drafting by batch size, fastest draft setting of each engine")
    legend(axes)
    caption(figure, of_intervals(result, HOLLOW), "The setting was chosen on the calls that it is measured on.")
    return figure


def time_until_it_pays(result: Result, batch: int) -> Figure:
    """Seconds over new tokens, cold calls included, of plain generate() and the fastest method of each engine."""
    figure, (axes,) = new_figure(4.4)
    plain = next(m for m in result["methods"] if m["kind"] == "plain")
    found = [plain, *(best_on(result, engine, batch) for engine in engines_of(result))]
    lines = [
        (method, line)
        for method in found
        if method is not None and (line := _cost_line(result, method, batch)) is not None
    ]
    sentences = []
    for number, (method, (cold, rate)) in enumerate(lines):
        label = f"{_title(result, method)}: {cold:.2g} s, then {rate:.0f} tokens/s"
        times = [cold + tokens / rate for tokens in _TOKENS]
        axes.plot(_TOKENS, times, color=BY_ENGINE[method["engine"]], label=label)
        pays = [_mark_crossing(axes, result, later, method, batch) for later in lines[number + 1 :]]
        if said := ", ".join(words for words in pays if words):
            sentences.append(f"Over {_engine(result, method)}: {said}.")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):  # their usual labels are formulas
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter("")
    axes.set_xlabel("New tokens")
    axes.set_ylabel("Time with loading and cold calls (s)")
    axes.grid(color="0.92")
    figure.suptitle(f"Tokens until recording and compiling pay, batch size {batch}")
    legend(axes)
    caption(figure, *sentences)
    return figure


def _mark_crossing(
    axes: Axes, result: Result, later: tuple[MethodDict, tuple[float, float]], base: MethodDict, batch: int
) -> str | None:
    """Mark where a method has made up for its longer start over another one, and say so; None where it never does."""
    method, (cold, rate) = later
    pays = speed.tokens_until_it_pays(result, method["name"], base["name"], batch)
    if not pays:
        return None
    if _TOKENS[0] <= pays <= _TOKENS[-1]:
        axes.plot([pays], [cold + pays / rate], "o", color=BY_ENGINE[method["engine"]])
    return f"{_engine(result, method)} pays after {approximate(pays)} tokens"


def _title(result: Result, method: MethodDict) -> str:
    """A method's title with the words for its engine that the waterfall has."""
    engine = method["engine"]
    if method["kind"] == "plain":
        return str(method["title"])
    return f"{method['title'].removesuffix(f', {engine}')}, {ENGINE_WORDS[engine]}"


def _engine(result: Result, method: MethodDict) -> str:
    return str(method["title"]) if method["kind"] == "plain" else ENGINE_WORDS[method["engine"]]


def _cost_line(result: Result, method: MethodDict, batch: int) -> tuple[float, float] | None:
    """(seconds of cold calls and of loading the draft, tokens per second when warm)."""
    rate = speed.decode_rate(speed.calls_of(result, method["name"], batch=batch))
    cold = speed.cold_seconds(result, method["name"], batch)
    return None if rate is None or cold is None else (cold + speed.loading_seconds(result, method), rate)
