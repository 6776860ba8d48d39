"""The results of `sweep` as tables and a recommendation: pure functions from the dict that the JSON holds."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from statistics import mean
from typing import Any

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.tradeoff import JUDGED, labels, won
from hf_specdec.bench.reports.heading import heading, remarks, split_of
from hf_specdec.bench.reports.markdown import mean_and_spread, number, table
from hf_specdec.bench.reports.outputs import equal_outputs

Result = Mapping[str, Any]
MethodDict = Mapping[str, Any]

# In which precision and where a row ran, with the defaults of these arguments: they are part of its command.
_PLACES = {
    "dtype": "auto",
    "draft_dtype": "auto",
    "precision": None,
    "draft_precision": None,
    "device": None,
    "draft_device": None,
    "device_map": None,
    "offload_folder": None,
}

LEGEND = (
    "Each figure is the mean of the repeats ± their standard deviation. Speedup: ratio of decode tokens/s (micro: all "
    "tokens / all seconds after the first delivery) over plain decoding in the same repeat, on the examples "
    "that have a rate in both, so the ratio of two rates shown may differ. c: one draft step / one target step, bare "
    "forward passes. The predicted speedup takes each token's acceptance for independent of the others', so it is an "
    "estimate. Quality is measured against the references, 0 to 100. Won: on how many subtasks "
    "BiLD is faster, in every repeat, than the fastest row of speculative decoding, while neither its ROUGE-L nor "
    "its exact match is below plain decoding's."
)


def render(result: Result) -> str:
    """The whole report."""
    lines = [*recommendations(result), *remarks(result)]
    parts = [
        heading(result),
        LEGEND,
        _tables(result),
        "## Best settings\n\n" + "\n".join(f"- {line}" for line in lines),
    ]
    return "\n\n".join(parts) + "\n"


def terminal(result: Result) -> str:
    """The tables, the best row and its command."""
    return "\n\n".join([_tables(result), *recommendations(result), *remarks(result)]) + "\n"


def _tables(result: Result) -> str:
    parts = [f"## Drafts and lookaheads\n\n{draft_table(result)}"]
    if methods_of(result, "bild"):
        parts.append(f"## BiLD's thresholds\n\n{threshold_table(result)}")
    return "\n\n".join(parts)


def methods_of(result: Result, strategy: str) -> list[MethodDict]:
    """The rows of a strategy."""
    return [method for method in result["methods"] if method.get("strategy") == strategy]


def speedups(result: Result, method: MethodDict) -> list[float]:
    """Over plain decoding, one a repeat."""
    return speed.speedup_by_repeat(result["runs"], method["name"], "plain")


def speed_ratios(result: Result, method: MethodDict) -> list[float]:
    """c, one a repeat."""
    return [c for c, _ in _cost_ratios(result, method)]


def _cost_ratios(result: Result, method: MethodDict) -> list[tuple[float, float]]:
    """(c, v) of each repeat, from the raw forwards of all subtasks in it."""
    repeats: dict[int, list[Mapping[str, Any]]] = {}
    for item in result["forwards"]:
        if item["draft"] == method["draft"]:
            repeats.setdefault(item["repeat"], []).append(item["times"])
    return [
        speed.cost_ratios(speed.pooled_forwards(samples), method["lookahead"]) for _, samples in sorted(repeats.items())
    ]


def draft_table(result: Result) -> str:
    """One row a draft and lookahead: the published columns, and what they predict."""
    header = ["Draft", "Parameters", "n_lookahead", "Mean acceptance rate", "Inference speed ratio (c)", "Speedup"]
    header += ["Predicted speedup", "Tokens/Round", "α", "Tokens/Sec", "Outputs as plain"]
    rows = [
        [
            method["draft"],
            parameters(method["draft_parameters"]),
            str(method["lookahead"]),
            *_acceptance_and_ratio(result, method),
            mean_and_spread(speedups(result, method), 2),
            number(_predicted(result, method), 2),
            *_round_figures(result, method),
            equal_outputs(result, method["name"]),
        ]
        for method in methods_of(result, "speculative")
    ]
    plain = _rates(result, {"name": "plain"})
    rows.insert(0, ["none (plain decoding)", *["–"] * 4, "1.00", *["–"] * 3, mean_and_spread(plain, 1), "–"])
    return table(header, rows)


def threshold_table(result: Result) -> str:
    """One row a draft, lookahead and pair of thresholds: speed and quality, beside plain and speculative decoding."""
    header = ["Draft", "n_lookahead", "Fallback", "Rollback", "Mean acceptance rate", "Speedup", "Tokens/Round", "α"]
    header += ["Tokens/Sec", "Outputs as plain", "BLEU", "ROUGE-L", "Exact match", "Won"]
    rows = [
        ["none (plain decoding)", *["–"] * 4, "1.00", *["–"] * 2, mean_and_spread(_rates(result, {"name": "plain"}), 1)]
    ]
    rows[0] += ["–", *_quality(result, "plain"), "–"]
    for method in [*methods_of(result, "speculative"), *methods_of(result, "bild")]:
        lossless = method["strategy"] == "speculative"
        rows.append(
            [
                method["draft"] + (" (speculative)" if lossless else ""),
                str(method["lookahead"]),
                "–" if lossless else f"{method['fallback']:g}",
                "–" if lossless else f"{method['rollback']:g}",
                _acceptance_and_ratio(result, method)[0],
                mean_and_spread(speedups(result, method), 2),
                *_round_figures(result, method),
                equal_outputs(result, method["name"]),
                *_quality(result, method["name"]),
                "–" if lossless else _won_of(result, method),
            ]
        )
    return table(header, rows)


def recommendations(result: Result) -> list[str]:
    """The fastest row of each strategy with its command; of BiLD also the fastest that loses no quality, and the
    one that wins most subtasks at no loss, with the command that judges it on other examples."""
    lines = []
    for strategy in ("speculative", "bild"):
        best = _fastest(result, methods_of(result, strategy))
        if best is not None:
            lines.append(_recommended(f"Fastest {strategy}", result, best))
    if methods_of(result, "bild") and result["quality"]:
        best = _fastest(result, _without_loss(result))
        without_loss = "Fastest bild with ROUGE-L and exact match no lower than plain decoding's"
        lines.append(f"{without_loss}: none." if best is None else _recommended(without_loss, result, best))
        lines.append(_chosen(result))
    return lines


def _without_loss(result: Result) -> list[MethodDict]:
    """BiLD's rows that are no worse than plain decoding over all examples."""
    plain = quality_of(result, "plain")
    rows = methods_of(result, "bild")
    return [row for row in rows if all(quality_of(result, row["name"])[name] >= plain[name] for name in JUDGED)]


def chosen_row(result: Result) -> MethodDict:
    """The row of BiLD's that wins most subtasks; of several the fastest."""
    counts = {method["name"]: won_subtasks(result, method) or 0 for method in methods_of(result, "bild")}
    most = [method for method in methods_of(result, "bild") if counts[method["name"]] == max(counts.values())]
    return _fastest(result, most) or most[0]


def won_subtasks(result: Result, method: MethodDict) -> int | None:
    """On how many subtasks this row of BiLD's beats the fastest speculative row, at no loss of quality."""
    speculative = _fastest(result, methods_of(result, "speculative"))
    return None if speculative is None else won(result, method["name"], speculative["name"])


def _won_of(result: Result, method: MethodDict) -> str:
    count = won_subtasks(result, method)
    return "–" if count is None else f"{count} of {len(labels(result))}"


def _chosen(result: Result) -> str:
    method = chosen_row(result)
    embedded = result["arguments"]["dataset"] == "embedded"
    split = split_of(result)
    where = "these examples" if split is None else f"the split {split}"
    text = (
        f"Faster than speculative decoding at no loss of quality on most subtasks: {method['title']}, on "
        f"{_won_of(result, method)}, chosen on {where}"
    )
    reference = _fastest(result, methods_of(result, "speculative")) or method
    if (reference["draft"], reference["lookahead"]) != (method["draft"], method["lookahead"]):
        text += f" (speculative decoding was fastest with {reference['draft']}, lookahead {reference['lookahead']})"
    if embedded and split == "train":
        return f"{text}; to judge it on examples that it was not chosen on: `{command(result, method, 'subtasks')}`"
    return f"{text}; judge it on other examples before you believe it."


def quality_of(result: Result, name: str) -> Mapping[str, float]:
    """A method's quality over all subtasks."""
    return next(item for item in result["quality"] if item["method"] == name and item["subtask"] is None)


def command(result: Result, method: MethodDict, task: str = "benchmark") -> str:
    """What to type to run a task with a row's settings."""
    arguments = result["arguments"]
    words = ["assisted_generation.py", "--task", task, "--assisted_generation"]
    words += ["--model_name", result["models"]["target"]["name"], "--assistant_model", method["draft"]]
    words += ["--generation_strategy", method["strategy"], "--num_assistant_tokens", str(method["lookahead"])]
    if method["strategy"] == "bild":
        words += ["--fallback_threshold", f"{method['fallback']:g}", "--rollback_threshold", f"{method['rollback']:g}"]
    for name, default in _PLACES.items():
        if arguments[name] != default:
            words += [f"--{name}", arguments[name]]
    if arguments["better_transformer"]:
        words.append("--better_transformer")
    if result["sampling"]:
        words.append("--do_sample")
        words += [f"--{name}={arguments[name]:g}" for name in ("temperature", "top_k", "top_p")]
    return shlex.join(words)


def _recommended(what: str, result: Result, method: MethodDict) -> str:
    return f"{what}: {method['title']}, {mean(speedups(result, method)):.2f} times plain: `{command(result, method)}`"


def _fastest(result: Result, methods: list[MethodDict]) -> MethodDict | None:
    rated = [(mean(ratios), number) for number, m in enumerate(methods) if (ratios := speedups(result, m))]
    return methods[max(rated)[1]] if rated else None


def _acceptance_and_ratio(result: Result, method: MethodDict) -> list[str]:
    repeats = speed.by_repeat(result["runs"], method["name"])
    rates = [rate for runs in repeats if (rate := speed.acceptance_rate(runs)) is not None]
    return [mean_and_spread(rates, 3), mean_and_spread(speed_ratios(result, method), 3)]


def _round_figures(result: Result, method: MethodDict) -> list[str]:
    """Tokens a round, α, and tokens/s."""
    runs = [run for run in result["runs"] if run["method"] == method["name"]]
    figures = [number(speed.tokens_per_round(runs), 2), number(speed.alpha(runs), 3)]
    return [*figures, mean_and_spread(_rates(result, method), 1)]


def _rates(result: Result, method: MethodDict) -> list[float]:
    repeats = speed.by_repeat(result["runs"], method["name"])
    return [rate for runs in repeats if (rate := speed.micro_rate(runs)) is not None]


def _predicted(result: Result, method: MethodDict) -> float | None:
    """From the mean α, c and v of all repeats."""
    alpha = speed.alpha(run for run in result["runs"] if run["method"] == method["name"])
    ratios = _cost_ratios(result, method)
    if alpha is None or not ratios:
        return None
    c, v = (mean(pair[place] for pair in ratios) for place in (0, 1))
    return speed.predicted_speedup(alpha, c, v, method["lookahead"])


def _quality(result: Result, name: str) -> list[str]:
    if not result["quality"]:
        return ["–"] * 3
    measured = quality_of(result, name)
    return [number(measured[key], 1) for key in ("bleu", "rougeL", "exact_match")]


def parameters(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
