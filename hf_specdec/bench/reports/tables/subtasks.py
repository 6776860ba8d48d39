"""The results of `subtasks` as terminal lines and as markdown: pure functions from the dict that the JSON holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.tradeoff import labels, prompts_of, unknown, verdict, won
from hf_specdec.bench.reports.heading import heading, remarks
from hf_specdec.bench.reports.markdown import capital, number, percent, table
from hf_specdec.bench.reports.outputs import equal_outputs

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
    "Rates take of each example the repeat of median total time. Speedups are taken within each repeat, where the "
    "methods took turns: the median of the repeats (low–high), so the ratio of two rates shown may differ a bit. "
    "Examples with nothing after the first delivery have no rate and are left out. η is the share of the "
    "decoding time that the models' bare forward passes need at these widths, timed at a prompt of middling length of "
    "each subtask (above 1: recorded passes take less, or the bare ones met a worse moment than the runs)."
)
BILD = (
    "Speed: decode tokens/s within each repeat, the median (low–high). Faster: in every repeat. At no loss of quality: "
    "neither ROUGE-L nor exact match is below plain decoding's."
)
DRAWN = (
    "Outputs are drawn, each method's with the same seed for the same example, so every repeat gives the same ones. "
    "Quality is that of these single draws: speculative decoding, transformers' assisted generation and prompt lookup "
    "have plain decoding's in expectation, and differ from it here by chance alone; BiLD's may differ truly."
)


def render(result: Result) -> str:
    """The whole report."""
    parts = [heading(result), LEGEND, f"## Speedup by subtask\n\n{speedup_table(result)}"]
    parts.append(f"## Overall\n\n{group_table(result, None)}")
    if len(labels(result)) > 1:
        parts += [f"## {label}\n\n{group_table(result, label)}" for label in labels(result)]
    parts.append(f"## Where the time goes\n\n{time_table(result)}")
    if _both(result):
        parts.append(f"## BiLD against speculative decoding\n\n{BILD}\n\n{bild_table(result)}\n\n{count_line(result)}")
    if result["quality"]:
        drawn = f"{DRAWN}\n\n" if result["sampling"] else ""
        parts.append(f"## Quality against the references, 0 to 100\n\n{drawn}{quality_table(result)}")
    if not result["sampling"]:
        parts.append(f"## Outputs that differ from plain decoding\n\n{divergence_table(result)}")
    lines = [average_alpha(result), *remarks(result)]
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
    for label in (None, *labels(result)):
        lines.append("")
        plain = list(_typical(result, "plain", label).values())
        for method in result["methods"][1:]:
            runs = list(_typical(result, method["name"], label).values())
            ratio = number(speed.middle(_ratios(result, method["name"], label)), 2)
            lines.append(
                f"{label or 'Overall'} Result: "
                f"AS: {number(speed.micro_rate(plain), 1)} tokens/sec, "
                f"{SHORT[method['name']]}: {number(speed.micro_rate(runs), 1)} tokens/sec "
                f"-> {ratio} X Speedup"
            )
    lines += ["", average_alpha(result)]
    lines += [count_line(result)] if _both(result) else []
    lines += remarks(result)
    return "\n".join(lines) + "\n"


def speedup_table(result: Result) -> str:
    """One row a subtask, one column a method: micro speedups over plain decoding."""
    methods = result["methods"][1:]
    rows = []
    for label in (*labels(result), None):
        cells = [_speedup(_ratios(result, m["name"], label)) for m in methods]
        examples = str(len(prompts_of(result, label)))
        rate = number(speed.micro_rate(_typical(result, "plain", label).values()), 1)
        rows.append(["overall" if label is None else label, examples, rate, *cells])
    return table(["Subtask", "Examples", "Plain Tokens/Sec", *(capital(m["title"]) for m in methods)], rows)


def group_table(result: Result, label: str | None) -> str:
    """One row a method for the examples of a subtask, or for all."""
    rows = []
    forwards = _forwards_by_prompt(result)
    for method in result["methods"]:
        listed = list(_typical(result, method["name"], label).values())
        macro = _ratios(result, method["name"], label, speed.macro_speedup)
        rows.append(
            [
                capital(method["title"]),
                number(speed.micro_rate(listed), 1),
                _speedup(_ratios(result, method["name"], label)),
                number(speed.macro_rate(listed), 1),
                number(speed.middle(macro), 2),
                number(speed.end_to_end_rate(listed), 1),
                percent(speed.acceptance_rate(listed)),
                number(speed.tokens_per_round(listed), 2),
                number(speed.alpha(listed), 3),
                number(speed.efficiency(listed, forwards), 2),
                equal_outputs(result, method["name"], prompts=prompts_of(result, label)),
                str(sum(speed.decode_part(run) is None for run in listed)),
            ]
        )
    header = ["Method", "Tokens/Sec (micro)", "Speedup (micro)", "Tokens/Sec (macro)", "Speedup (macro)"]
    header += ["Tokens/Sec (end to end)", "Acceptance", "Tokens/Round", "α", "η"]
    header += ["Outputs as plain", "Without a rate"]
    return table(header, rows)


def quality_table(result: Result) -> str:
    """One row a subtask and method: how good the outputs are against the references."""
    titles = {method["name"]: capital(method["title"]) for method in result["methods"]}
    order = [*labels(result), None]
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
        value = speed.alpha(_typical(result, method["name"], None).values())
        if value is not None:
            values.append(f"{SHORT.get(method['name'], method['name'])} {value:.3f}")
    return "Average alpha: " + (", ".join(values) if values else "– (nothing was drafted)")


def time_table(result: Result) -> str:
    """One row a subtask and method that tells: a round's draft, verification and overhead."""
    rows = []
    for label in (*labels(result), None):
        for method in result["methods"]:
            parts = speed.round_parts(_typical(result, method["name"], label).values())
            if parts is None:
                continue
            draft, verify, overhead = (1000 * parts[key] for key in ("draft", "verify", "overhead"))
            milliseconds = [number(value, 2) for value in (draft, verify, overhead)]
            share = percent(overhead / (draft + verify + overhead))
            steps = number(parts["draft_steps"], 2)
            rows.append([label or "overall", capital(method["title"]), steps, *milliseconds, share])
    header = ["Subtask", "Method", "Draft steps/Round", "Draft (ms/round)", "Verification (ms/round)"]
    return table([*header, "Overhead (ms/round)", "Overhead share"], rows)


def bild_table(result: Result) -> str:
    """One row a subtask: BiLD's speed over speculative decoding's, its quality less plain decoding's, the verdict."""
    rows = []
    for label in (*labels(result), None):
        found = verdict(result, label, "bild", "speculative")
        differences = ["–"] * 2
        if found.differences is not None:
            differences = [f"{found.differences[name]:+.1f}" for name in ("rougeL", "exact_match")]
        examples = str(len(prompts_of(result, label)))
        rows.append([label or "overall", examples, _speedup(found.ratios), *differences, found.words])
    header = ["Subtask", "Examples", "Speed of BiLD / speculative", "ROUGE-L, BiLD − plain"]
    return table([*header, "Exact match, BiLD − plain", "Faster at no loss of quality"], rows)


def count_line(result: Result) -> str:
    """The outcome in a sentence."""
    count = won(result, "bild", "speculative")
    if count is None:
        return "Whether BiLD loses quality is not known: the data have no references."
    bild = next(method["title"] for method in result["methods"] if method["name"] == "bild")
    of = f"{count} of {len(labels(result))} subtasks"
    without = unknown(result, "bild", "speculative")
    rest = f"; of the others {without} can't be judged, for want of references or rates" if without else ""
    return f"{bild} is faster than speculative decoding at no loss of quality on {of}{rest}."


def _both(result: Result) -> bool:
    return {"bild", "speculative"} <= {method["name"] for method in result["methods"]}


def _typical(result: Result, method: str, label: str | None) -> dict[int, speed.RunDict]:
    return speed.typical_runs(result["runs"], method, prompts_of(result, label))


def _ratios(
    result: Result,
    method: str,
    label: str | None,
    ratio: Callable[[Mapping[int, speed.RunDict], Mapping[int, speed.RunDict]], float | None] = speed.speedup,
) -> list[float]:
    """Over plain decoding, one a repeat."""
    return speed.speedup_by_repeat(result["runs"], method, "plain", prompts_of(result, label), ratio)


def _speedup(ratios: Sequence[float]) -> str:
    """The median of the repeats and, of several that differ, the lowest and the highest."""
    within = f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(set(ratios)) > 1 else ""
    return number(speed.middle(ratios), 2) + within


def _forwards_by_prompt(result: Result) -> dict[int, Mapping[str, Any]]:
    """Raw forwards of each prompt's subtask, of all repeats."""
    pooled = {
        label: speed.pooled_forwards([item["times"] for item in result["forwards"] if item["label"] == label])
        for label in labels(result)
    }
    return {prompt["index"]: pooled[prompt["label"]] for prompt in result["prompts"]}
