"""Pictures of results: functions from the dict that the JSON holds to a matplotlib figure.

A module of its own, since importing matplotlib takes a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed, tradeoff
from hf_specdec.bench.reports import subtasks_report, sweep_report
from hf_specdec.bench.reports.markdown import capital

Result = Mapping[str, Any]
MethodDict = Mapping[str, Any]

# Told apart by colour-blind readers too (Okabe and Ito); a method keeps its colour in every picture.
_COLOURS = {
    "plain": "#999999",
    "speculative": "#0072B2",
    "bild": "#D55E00",
    "assisted": "#009E73",
    "prompt_lookup": "#CC79A7",
}
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_PARTS = {"Draft": ("draft", "#56B4E9"), "Verification": ("verify", "#0072B2"), "Overhead": ("overhead", "#BBBBBB")}


def speed_by_length(result: Result) -> Figure:
    """Benchmark: tokens/s of every method at each prompt length; the bars' ends are the repeats' extremes."""
    lengths = list(dict.fromkeys(prompt["tokens"] for prompt in result["prompts"]))
    figure, axes = _new(2.5 + 2.5 * len(lengths), 4.5)
    gains = []
    for place, length in enumerate(lengths):
        prompts = [prompt["index"] for prompt in result["prompts"] if prompt["tokens"] == length]
        for number, method in enumerate(result["methods"]):
            runs = speed.typical_runs(result["runs"], method["name"], prompts)
            rate = speed.micro_rate(runs.values()) or 0.0
            chosen = [run for run in result["runs"] if run["prompt"] in runs]
            rates = [value for one in speed.by_repeat(chosen, method["name"]) if (value := speed.micro_rate(one))]
            label = capital(method["title"]) if place == 0 else None
            _bar(axes, _offset(place, number, len(result["methods"])), rate, rates, _colour(method), label, result)
            if number == 1:
                ratio = speed.middle(speed.speedup_by_repeat(result["runs"], method["name"], "plain", prompts))
                gains.append("–" if ratio is None else f"{ratio:.2f}× at {length} tokens")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_xlabel("Prompt length (tokens)")
    axes.set_ylabel("Decoding speed (tokens/s)")
    what = capital(result["methods"][1]["title"]) if len(result["methods"]) > 1 else "Plain decoding"
    axes.set_title(f"{what} over plain: {', '.join(gains)}" if gains else what)
    _legend_below(figure, axes)
    return figure


def speedup_by_subtask(result: Result) -> Figure:
    """Subtasks: speedup over plain decoding of each method on each subtask; the bars' ends are repeats' extremes."""
    labels: list[str | None] = [*tradeoff.labels(result), None]
    methods = result["methods"][1:]
    figure, axes = _new(max(8.0, 2 + 1.15 * len(labels)), 5)
    overall = []
    for place, label in enumerate(labels):
        prompts = tradeoff.prompts_of(result, label)
        for number, method in enumerate(methods):
            ratios = speed.speedup_by_repeat(result["runs"], method["name"], "plain", prompts)
            ratio = speed.middle(ratios) or 0.0
            title = capital(method["title"]) if place == 0 else None
            if label is None and method["name"] in ("speculative", "bild"):
                overall.append(f"{subtasks_report.SHORT[method['name']]} {ratio:.2f}×")
            _bar(axes, _offset(place, number, len(methods)), ratio, ratios, _colour(method), title, result)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(labels)), [(label or "all").replace(" ", "\n").replace("_", "\n") for label in labels])
    axes.set_xlabel("Subtask")
    axes.set_ylabel("Speedup over plain decoding (×)")
    axes.set_title(f"Faster than plain decoding above the line; over all examples: {', '.join(overall)}")
    _legend_below(figure, axes)
    return figure


def speedup_over_lookahead(result: Result) -> Figure:
    """Sweep: speedup of speculative decoding over the lookahead, a line a draft; bars are standard deviations."""
    figure, axes = _new(7, 4.5)
    methods = sweep_report.methods_of(result, "speculative")
    for number, draft in enumerate(dict.fromkeys(method["draft"] for method in methods)):
        mine = sorted((m for m in methods if m["draft"] == draft), key=lambda method: int(method["lookahead"]))
        points = [(m["lookahead"], ratios) for m in mine if (ratios := sweep_report.speedups(result, m))]
        label = f"{_short(draft)} ({sweep_report.parameters(mine[0]['draft_parameters'])})"
        axes.errorbar(
            [lookahead for lookahead, _ in points],
            [mean(ratios) for _, ratios in points],
            yerr=[_deviation(ratios) for _, ratios in points],
            color=_LINES[number % len(_LINES)],
            marker="o",
            capsize=3,
            label=label,
        )
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(sorted({method["lookahead"] for method in methods}))
    axes.set_xlabel("n_lookahead (draft tokens per round)")
    axes.set_ylabel("Speedup over plain decoding (×)")
    axes.set_title("Where each draft peaks: longer drafts cost more and are accepted less")
    axes.legend(title="Draft (parameters)")
    return figure


def threshold_maps(result: Result, draft: str, lookahead: int) -> Figure:
    """Sweep: BiLD's speedup and quality over fallback and rollback threshold, of one draft and lookahead."""
    methods = [
        method
        for method in sweep_report.methods_of(result, "bild")
        if (method["draft"], method["lookahead"]) == (draft, lookahead)
    ]
    speeds = {(m["fallback"], m["rollback"]): mean(sweep_report.speedups(result, m) or [nan]) for m in methods}
    maps = [("Speedup over plain decoding (×)", "viridis", speeds, 0.1)]
    if result["quality"]:
        qualities = {(m["fallback"], m["rollback"]): _rouge(result, m["name"]) for m in methods}
        plain = _rouge(result, "plain")
        maps.append((f"ROUGE-L, 0–100 (plain decoding: {plain:.1f})", "cividis", qualities, 2.0))
    columns = len({method["rollback"] for method in methods})
    figure = Figure(figsize=(len(maps) * (2.6 + 0.75 * columns), 4.4), dpi=120, layout="constrained")
    for number, (title, colours, values, span) in enumerate(maps, start=1):
        _heat_map(figure, figure.add_subplot(1, len(maps), number), title, colours, values, span)
    figure.suptitle(f"BiLD with {_short(draft)}, lookahead {lookahead}: what each pair of thresholds brings, and costs")
    return figure


def speed_against_quality(result: Result) -> Figure:
    """BiLD's settings as points; lossless methods share plain decoding's quality, a vertical line."""
    figure, axes = _new(7.5, 5)
    plain = _rouge(result, "plain")
    axes.axvline(plain, color="black", linewidth=1, label="Quality of plain and of lossless decoding")
    axes.plot([plain], [1.0], marker="s", color=_COLOURS["plain"], linestyle="none", label="Plain decoding")
    drafts = list(dict.fromkeys(method.get("draft") for method in result["methods"][1:]))
    seen = set()
    for method in result["methods"][1:]:
        ratios = speed.speedup_by_repeat(result["runs"], method["name"], "plain")
        if not ratios:
            continue
        strategy = method.get("strategy", method["name"])
        lossy = strategy == "bild"
        colour = _LINES[drafts.index(method["draft"]) % len(_LINES)] if "draft" in method else _colour(method)
        label = capital(method["title"])
        if "draft" in method:
            label = f"{'BiLD' if lossy else 'Speculative'}, {_short(method['draft'])}"
        axes.errorbar(
            _rouge(result, method["name"]) if lossy else plain,
            mean(ratios),
            yerr=_deviation(ratios),
            color=colour,
            marker="o" if lossy else "D",
            fillstyle="full" if lossy else "none",
            capsize=2,
            linestyle="none",
            label=None if label in seen else label,
        )
        seen.add(label)
    # At least two points wide, so that a word more or less doesn't look like a loss.
    low, high = _limits([plain, *(_rouge(result, m["name"]) for m in result["methods"])], 2.0)
    axes.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.set_xlabel("Quality: ROUGE-L against the references (0–100)")
    axes.set_ylabel("Speedup over plain decoding (×)")
    axes.set_title("Up is faster, right is better; left of the line BiLD has paid in quality")
    _legend_below(figure, axes)
    return figure


def time_per_round(result: Result) -> Figure:
    """Mean time of a round after the first, split into draft, verification and the rest; of methods that tell."""
    parts_of = {}
    for method in result["methods"]:
        found = speed.round_parts(run for run in result["runs"] if run["method"] == method["name"])
        if found is not None:
            parts_of[method["title"]] = found
    figure, axes = _new(8, 1.8 + 0.55 * len(parts_of))
    shares = []
    for place, found in enumerate(parts_of.values()):
        left = 0.0
        for part, (key, colour) in _PARTS.items():
            value = 1000 * found[key]
            axes.barh(place, value, left=left, color=colour, label=part if place == 0 else None)
            left += value
        shares.append(1000 * found["overhead"] / left)
    axes.set_yticks(range(len(parts_of)), [_wrapped(title) for title in parts_of])
    axes.invert_yaxis()
    axes.set_xlabel("Mean time per round (ms)")
    axes.set_title(f"What a round costs: at most {100 * max(shares):.1f}% is neither draft nor target")
    _legend_below(figure, axes)
    return figure


def acceptance_by_position(result: Result) -> Figure:
    """Share of accepted tokens at each position of a draft, among the rounds that reached it."""
    figure, axes = _new(7, 4.5)
    longest = 0
    for number, method in enumerate(result["methods"]):
        shares = speed.acceptance_by_position(r for r in result["runs"] if r["method"] == method["name"])
        if shares:
            longest = max(longest, len(shares))
            colour = _colour(method) if method["name"] in _COLOURS else _LINES[number % len(_LINES)]
            # In greedy decoding transformers' own loop accepts what ours does: drawn so that both can be seen.
            style = "x--" if method["name"] == "assisted" else "o-"
            axes.plot(range(1, len(shares) + 1), shares, style, color=colour, label=capital(method["title"]))
    axes.set_xticks(range(1, longest + 1))
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("Position in the draft (tokens)")
    axes.set_ylabel("Accepted share of the tokens reached there")
    axes.set_title("A level line: each drafted token is as good as the one before it")
    _legend_below(figure, axes)
    return figure


def ablation_bars(result: Result) -> Figure:
    """Ablation: tokens/s of all eight rows; bars are standard deviations."""
    figure, axes = _new(7.5, 4.5)
    places = {(False, False): 0, (False, True): 1, (True, False): 2, (True, True): 3}
    for method in result["methods"]:
        repeats = speed.by_repeat(result["runs"], method["name"])
        rates = [rate for one in repeats if (rate := speed.micro_rate(one)) is not None]
        place = places[method["cache"], method["better_transformer"]]
        kind = "speculative" if method["speculative"] else "plain"
        label = {"speculative": "With a draft", "plain": "Plain decoding"}[kind] if place == 0 else None
        height = mean(rates) if rates else 0.0
        at = _offset(place, int(method["speculative"]), 2)
        axes.bar(at, height, width=0.38, yerr=_deviation(rates) or None, capsize=3, color=_COLOURS[kind], label=label)
    names = ["no cache\neager", "no cache\nBetter Transformer", "KV cache\neager", "KV cache\nBetter Transformer"]
    axes.set_xticks(range(4), names)
    axes.set_xlabel("Cache and attention")
    axes.set_ylabel("Decoding speed (tokens/s)")
    axes.set_title("What speculation brings with and without cache and fast attention")
    axes.legend()
    return figure


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bar(
    axes: Axes, at: float, height: float, repeats: Sequence[float], colour: str, label: str | None, result: Result
) -> None:
    """A bar with the extremes of the repeats; how wide depends on how many methods stand side by side."""
    ends = None
    if len(repeats) > 1:
        ends = [[max(0.0, height - min(repeats))], [max(0.0, max(repeats) - height)]]
    width = 0.8 / max(1, len(result["methods"]))
    axes.bar(at, height, width=width, yerr=ends, capsize=2, color=colour, label=label, error_kw={"linewidth": 1})


def _offset(place: int, number: int, count: int) -> float:
    return place + 0.8 * ((number + 0.5) / count - 0.5)


def _heat_map(
    figure: Figure, axes: Axes, title: str, colours: str, values: Mapping[tuple[float, float], float], span: float
) -> None:
    """The colours span at least `span`, so that noise doesn't look like a difference; nan stands for unknown."""
    fallbacks, rollbacks = (sorted({key[place] for key in values}) for place in (0, 1))
    grid = [[values[fallback, rollback] for rollback in rollbacks] for fallback in fallbacks]
    low, high = _limits(values.values(), span)
    image = axes.imshow(grid, cmap=colours, aspect="auto", origin="lower", vmin=low, vmax=high)
    middle = (low + high) / 2
    digits = ".2f" if span < 1 else ".1f"
    for row, line in enumerate(grid):
        for column, value in enumerate(line):
            colour = "white" if value <= middle else "black"
            text = "–" if isnan(value) else f"{value:{digits}}"
            axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(len(rollbacks)), [f"{value:g}" for value in rollbacks])
    axes.set_yticks(range(len(fallbacks)), [f"{value:g}" for value in fallbacks])
    axes.set_xlabel("Rollback threshold (nats)")
    axes.set_ylabel("Fallback threshold (probability)")
    axes.set_title(title, fontsize="medium")
    figure.colorbar(image, ax=axes)


def _limits(values: Iterable[float], span: float) -> tuple[float, float]:
    """Lowest and highest of those known, moved apart to `span` where they are closer."""
    listed = [value for value in values if not isnan(value)]
    low, high = min(listed, default=0.0), max(listed, default=0.0)
    more = max(0.0, span - (high - low)) / 2
    return low - more, high + more


def _rouge(result: Result, name: str) -> float:
    return float(sweep_report.quality_of(result, name)["rougeL"])


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _colour(method: MethodDict) -> str:
    return _COLOURS.get(method["name"], "#E69F00")


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def _wrapped(title: str) -> str:
    return capital(title).replace(" (", "\n(", 1)


def _legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    # Three long names side by side need a wide figure.
    columns = min(3 if figure.get_figwidth() > 9 or max(map(len, labels)) < 20 else 2, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small", frameon=False)
