"""The results of `subtasks` as terminal lines and as markdown: pure functions from the dict that the JSON holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from hf_specdec.bench import metrics
from hf_specdec.bench.markdown import capital, number, percent, table
from hf_specdec.bench.report import heading, remarks

Result = Mapping[str, Any]

SHORT = {"plain": "AS", "speculative": "SPS", "bild": "BiLD", "assisted": "HF assisted", "prompt_lookup": "Lookup"}
MEASURE_TITLES = {
    "bleu": "BLEU",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "exact_match": "Exact match",
}
LEGEND = (
    "Tokens/Sec counts what came after each example's first delivery. Micro: all tokens / all seconds, and the speedup "
    "is the ratio of these; macro is Spec-Bench's way: the mean of the examples' rates, and the ratio of those means. "
    "Each example counts with the repeat of median total time; (low–high) are the speedups within single repeats. "
    "Examples with nothing after the first delivery have no rate and are left out of both."
)


def render(result: Result) -> str:
    """The whole report."""
    parts = [heading(result), LEGEND, f"## Speedup by subtask\n\n{speedup_table(result)}"]
    parts.append(f"## Overall\n\n{group_table(result, None)}")
    if len(groups(result)) > 1:
        parts += [f"## {label}\n\n{group_table(result, label)}" for label in groups(result)]
    if result["quality"]:
        parts.append(f"## Quality against the references, 0 to 100\n\n{quality_table(result)}")
    if not result["sampling"]:
        parts.append(f"## Outputs that differ from plain decoding\n\n{divergence_table(result)}")
    lines = [average_alpha(result), *bild_against_speculative(result), *remarks(result)]
    parts.append("## Remarks\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def terminal(result: Result) -> str:
    """The configuration, one line a method for all examples and for each subtask, and the average alpha."""
    arguments, models = result["arguments"], result["models"]
    temperature = f"{arguments['temperature']:g}" if result["sampling"] else "0 (greedy)"
    lines = [
        "Configuration",
        f"  target:       {models['target']['name']}",
        f"  draft:        {models['draft']['name']}",
        f"  temperature:  {temperature}",
        f"  max tokens:   {arguments['max_new_tokens']}",
        f"  gamma:        {result['lookahead']}",
        f"  thresholds:   fallback {arguments['fallback_threshold']:g}, rollback {arguments['rollback_threshold']:g}",
        "  tokens/sec:   after the first delivery, micro (all tokens / all seconds)",
    ]
    for label in (None, *groups(result)):
        lines.append("")
        plain = _typical(result, "plain", label)
        for method in result["methods"][1:]:
            runs = _typical(result, method["name"], label)
            ratio = number(metrics.speedup(runs, plain), 2)
            lines.append(
                f"{label or 'Overall'} Result: "
                f"AS: {number(metrics.micro_rate(plain.values()), 1)} tokens/sec, "
                f"{SHORT[method['name']]}: {number(metrics.micro_rate(runs.values()), 1)} tokens/sec "
                f"-> {ratio} X Speedup"
            )
    lines += ["", average_alpha(result), *remarks(result)]
    return "\n".join(lines) + "\n"


def groups(result: Result) -> list[str]:
    """The subtasks, in the order of the data."""
    return list(dict.fromkeys(prompt["label"] for prompt in result["prompts"]))


def prompts_of(result: Result, label: str | None) -> list[int]:
    """The indexes of a subtask's prompts; of all for None."""
    return [prompt["index"] for prompt in result["prompts"] if label in (None, prompt["label"])]


def speedup_table(result: Result) -> str:
    """One row a subtask, one column a method: micro speedups over plain decoding."""
    methods = result["methods"][1:]
    rows = []
    for label in (*groups(result), None):
        plain = _typical(result, "plain", label)
        cells = [
            number(metrics.speedup(_typical(result, m["name"], label), plain), 2) + _range(result, m["name"], label)
            for m in methods
        ]
        examples = str(len(prompts_of(result, label)))
        rate = number(metrics.micro_rate(plain.values()), 1)
        rows.append(["overall" if label is None else label, examples, rate, *cells])
    return table(["Subtask", "Examples", "Plain Tokens/Sec", *(capital(m["title"]) for m in methods)], rows)


def group_table(result: Result, label: str | None) -> str:
    """One row a method for the examples of a subtask, or for all."""
    plain = _typical(result, "plain", label)
    rows = []
    for method in result["methods"]:
        runs = _typical(result, method["name"], label)
        listed = list(runs.values())
        rows.append(
            [
                capital(method["title"]),
                number(metrics.micro_rate(listed), 1),
                number(metrics.speedup(runs, plain), 2) + _range(result, method["name"], label),
                number(metrics.macro_rate(listed), 1),
                number(metrics.macro_speedup(runs, plain), 2),
                number(metrics.end_to_end_rate(listed), 1),
                percent(metrics.acceptance_rate(listed)),
                number(metrics.tokens_per_round(listed), 2),
                number(metrics.alpha(listed), 3),
                _same(result, method["name"], label),
                str(sum(metrics.decode_part(run) is None for run in listed)),
            ]
        )
    header = ["Method", "Tokens/Sec (micro)", "Speedup (micro)", "Tokens/Sec (macro)", "Speedup (macro)"]
    header += ["Tokens/Sec (end to end)", "Acceptance", "Tokens/Round", "α", "Outputs as plain", "Without a rate"]
    return table(header, rows)


def quality_table(result: Result) -> str:
    """One row a subtask and method: how good the outputs are against the references."""
    titles = {method["name"]: capital(method["title"]) for method in result["methods"]}
    order = [*groups(result), None]
    rows = [
        [
            "overall" if entry["subtask"] is None else entry["subtask"],
            titles[entry["method"]],
            str(entry["examples"]),
            number(entry["bleu"], 1),
            *(number(entry[name], 1) for name in ("rouge1", "rouge2", "rougeL", "exact_match")),
        ]
        for entry in sorted(result["quality"], key=lambda entry: order.index(entry["subtask"]))
    ]
    return table(["Subtask", "Method", "Examples", *MEASURE_TITLES.values()], rows)


def divergence_table(result: Result) -> str:
    """One row a method: how many outputs leave plain decoding's, where first, and how close the choice was."""
    rows = []
    for method in result["methods"][1:]:
        found = [p["divergences"][method["name"]] for p in result["prompts"] if method["name"] in p["divergences"]]
        margins = [item["margin"] for item in found]
        rows.append(
            [
                capital(method["title"]),
                f"{len(found)} of {len(result['prompts'])}",
                number(mean(item["position"] + 1 for item in found) if found else None, 1),
                f"{min(margins):.3g}" if margins else "–",
                f"{max(margins):.3g}" if margins else "–",
            ]
        )
    header = ["Method", "Outputs that differ", "First difference at token (mean)", "Smallest margin (logits)"]
    return table([*header, "Largest margin (logits)"], rows)


def average_alpha(result: Result) -> str:
    """α over all examples, of each method that tells it."""
    values = []
    for method in result["methods"][1:]:
        value = metrics.alpha(_typical(result, method["name"], None).values())
        if value is not None:
            values.append(f"{SHORT.get(method['name'], method['name'])} {value:.3f}")
    return "Average alpha: " + (", ".join(values) if values else "– (nothing was drafted)")


def bild_against_speculative(result: Result) -> Sequence[str]:
    """In words where BiLD is slower than the lossless way; empty where one of both is missing."""
    if not {"bild", "speculative"} <= {method["name"] for method in result["methods"]}:
        return []
    slower = []
    for label in groups(result):
        ratio = metrics.speedup(_typical(result, "bild", label), _typical(result, "speculative", label))
        if ratio is not None and ratio < 1:
            slower.append(f"{label} ({ratio:.2f})")
    if not slower:
        return ["BiLD is nowhere slower than speculative decoding."]
    return [f"BiLD is slower than speculative decoding on {len(slower)} of {len(groups(result))}: {', '.join(slower)}."]


def _typical(result: Result, method: str, label: str | None) -> dict[int, metrics.RunDict]:
    return metrics.typical_runs(result["runs"], method, prompts_of(result, label))


def _range(result: Result, method: str, label: str | None) -> str:
    """The speedups within single repeats, from lowest to highest; empty for plain decoding and for one repeat."""
    if method == "plain" or result["arguments"]["repeats"] < 2:
        return ""
    wanted = set(prompts_of(result, label))
    runs = [run for run in result["runs"] if run["prompt"] in wanted and run["method"] in (method, "plain")]
    ratios = metrics.speedup_by_repeat(runs, method, "plain")
    return f" ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""


def _same(result: Result, method: str, label: str | None) -> str:
    """How many outputs equal plain decoding's."""
    if result["sampling"]:
        return "–"
    wanted = set(prompts_of(result, label))
    differ = sum(p["index"] in wanted and method in p["divergences"] for p in result["prompts"])
    return f"{len(wanted) - differ} of {len(wanted)}"
