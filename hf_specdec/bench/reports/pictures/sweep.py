"""Pictures of the task sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_specdec.bench.figures import passes, quality, tradeoff
from hf_specdec.bench.figures.bootstrap import Interval
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.models.known_pairs import short_name
from hf_specdec.bench.reports.best_settings import methods_of
from hf_specdec.bench.reports.pictures.drawing import (
    LINES,
    caption,
    errors,
    legend,
    new_figure,
    of_intervals,
    sure,
    wide_enough,
)
from hf_specdec.bench.reports.tables import methods
from hf_specdec.bench.reports.tables.sweep import parameters, thresholds

Grid = Mapping[tuple[float, float], Interval]


def speedup_over_lookahead(result: Result) -> Figure:
    """The speedup over plain decoding on the same engine by lookahead, measured and predicted; `auto` at the right.

    Squares: drafts may also end by the entropy stop.
    """
    rows = [m for m in methods_of(result, "speculative") if m["draft"]]
    numbers = sorted({m["lookahead"] for m in rows if isinstance(m["lookahead"], int)})
    figure, (axes,) = new_figure(4.6)
    auto_at = numbers[-1] + 1.2
    drafts = list(dict.fromkeys(method["draft"] for method in rows))
    for number, draft in enumerate(drafts):
        colour, shift = LINES[number % len(LINES)], 0.12 * (number - (len(drafts) - 1) / 2)
        both = [method for method in rows if method["draft"] == draft]
        mine, stopping = [m for m in both if not _stops(m)], [m for m in both if _stops(m)]
        fixed = sorted((m for m in mine if isinstance(m["lookahead"], int)), key=lambda m: int(m["lookahead"]))
        label = f"{short_name(draft)} ({parameters(both[0]['draft_parameters'])})"
        _measured(axes, result, [(m["lookahead"] + shift, m) for m in fixed], colour, label, "-")
        _measured(axes, result, [(auto_at + shift, m) for m in mine if m["lookahead"] == "auto"], colour, None, "")
        places = [(auto_at if m["lookahead"] == "auto" else m["lookahead"], m) for m in stopping]
        _measured(axes, result, [(x + shift + 0.36, m) for x, m in places], colour, None, "", "s")
        predicted = [(m["lookahead"], value) for m in fixed if (value := passes.predicted(result, m)) is not None]
        axes.plot([x for x, _ in predicted], [y for _, y in predicted], ":", color=colour)
    axes.plot([], [], ":", color="0.4", label="predicted from α, c and v")
    if any(map(_stops, rows)):
        axes.plot([], [], "s", color="0.4", markersize=4, label="with the entropy stop")
    axes.axhline(1, color="black", linewidth=1)
    auto = any(method["lookahead"] == "auto" for method in rows)
    axes.set_xticks([*numbers, *([auto_at] if auto else [])], [*map(str, numbers), *(["auto"] if auto else [])])
    axes.set_xlabel("Lookahead (draft tokens per round)")
    axes.set_ylabel("Speedup over plain, same engine (×)")
    figure.suptitle("Speedup by draft and lookahead")
    legend(axes)
    caption(figure, of_intervals(result, "Bars: 95% interval, paired bootstrap over examples and repeats."))
    return figure


def _stops(method: MethodDict) -> bool:
    return bool(method["keywords"].get("entropy_threshold"))


def _measured(
    axes: Axes,
    result: Result,
    places: Sequence[tuple[float, MethodDict]],
    colour: str,
    label: str | None,
    line: str,
    marker: str = "o",
) -> None:
    found = [(x, gain) for x, method in places if (gain := methods.over(result, method, "engine")) is not None]
    for x, gain in found:
        axes.errorbar(x, gain.value, yerr=errors(gain), color=colour, marker=marker, markersize=4, capsize=2)
    if line:
        axes.plot([x for x, _ in found], [gain.value for _, gain in found], line, color=colour, label=label)


def threshold_maps(result: Result, draft: str, lookahead: int | str) -> Figure:
    """BiLD's speedup and change in quality by fallback and rollback threshold; one colour scale for all maps."""
    rows = [m for m in methods_of(result, "bild") if (m["draft"], m["lookahead"]) == (draft, lookahead)]
    maps = [("Speedup over plain, same engine (×)", "viridis", _speeds(result), 0.2, 1.0)]
    if result["quality"]:
        maps.append(("ROUGE-L, difference to plain (points)", "cividis", _changes(result), 2.0, 0.0))
    figure, panels = new_figure(1.8 + 0.5 * len({thresholds(m)[0] for m in rows}), columns=len(maps))
    for axes, (title, colours, found, span, neutral) in zip(panels, maps, strict=True):
        limits = wide_enough([item.value for item in found.values()], span)
        grid = {thresholds(m): found[m["name"]] for m in rows if m["name"] in found}
        known = [sorted({value for m in rows if (value := thresholds(m)[place]) is not None}) for place in (0, 1)]
        _heat_map(figure, axes, title, colours, grid, known, limits, neutral)  # type: ignore[arg-type]
    figure.suptitle(f"BiLD by threshold: {short_name(draft)}, lookahead {lookahead}")
    bold = "Bold: the 95% interval (paired bootstrap) excludes 1, or 0 for the difference."
    caption(figure, of_intervals(result, bold))
    return figure


def _speeds(result: Result) -> dict[str, Interval]:
    gains = {m["name"]: methods.over(result, m, "engine") for m in methods_of(result, "bild")}
    return {name: gain for name, gain in gains.items() if gain is not None}


def _changes(result: Result) -> dict[str, Interval]:
    plain, prompts = methods.plain_name(result), tradeoff.prompts_of(result, None)
    rows = methods_of(result, "bild")
    found = {m["name"]: quality.difference(result, m["name"], plain, "rougeL", prompts) for m in rows}
    return {name: change for name, change in found.items() if change is not None}


def _heat_map(
    figure: Figure,
    axes: Axes,
    title: str,
    colours: str,
    grid: Grid,
    known: Sequence[list[float]],
    limits: tuple[float, float],
    neutral: float,
) -> None:
    fallbacks, rollbacks = known
    values = [[_value(grid, fallback, rollback) for rollback in rollbacks] for fallback in fallbacks]
    image = axes.imshow(values, cmap=colours, aspect="auto", origin="lower", vmin=limits[0], vmax=limits[1])
    for row, fallback in enumerate(fallbacks):
        for column, rollback in enumerate(rollbacks):
            found = grid.get((fallback, rollback))
            text = "–" if found is None else f"{found.value:.2f}" if neutral else f"{found.value:+.1f}"
            dark = found is None or found.value <= sum(limits) / 2
            weight = "bold" if found is not None and sure(found, neutral) else "normal"
            colour = "black" if found is None else "white" if dark else "black"
            axes.text(column, row, text, ha="center", va="center", color=colour, weight=weight)
    axes.set_xticks(range(len(rollbacks)), [f"{value:g}" for value in rollbacks])
    axes.set_yticks(range(len(fallbacks)), [f"{value:g}" for value in fallbacks])
    axes.set_xlabel("Rollback threshold (nats)")
    axes.set_ylabel("Fallback threshold (probability)")
    axes.set_title(title, fontsize="medium")
    figure.colorbar(image, ax=axes)


def _value(grid: Grid, fallback: float, rollback: float) -> float:
    found = grid.get((fallback, rollback))
    return float("nan") if found is None else found.value
