"""Tables and terminal lines of the task subtasks."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from hf_specdec.bench.figures import quality, rounds, speed, tradeoff
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.figures.tradeoff import labels, prompts_of
from hf_specdec.bench.reports.heading import heading, joined, remarks
from hf_specdec.bench.reports.markdown import capital, difference, number, ratio, table
from hf_specdec.bench.reports.tables import methods

SHORT = {
    "plain": "AS",
    "none": "AS, our loop",
    "speculative": "SPS",
    "bild": "BiLD",
    "assisted": "HF assisted",
    "ensemble": "HF ensemble",
    "lookup": "Lookup",
}
MEASURE_TITLES = {
    "bleu": "BLEU",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "exact_match": "Exact match",
    "facts": "Facts",
}
NO_LOSS = (
    "No loss: a loss of more than one point is excluded by all measures, even if one further question lost all 100 "
    f"points; where no answer changes, this takes {quality.questions_needed(tradeoff.MOST_LOSS)} questions."
)
LOSS = (
    "Differences are in points, method − plain generate() on the same examples, with their 95% interval (paired "
    "bootstrap over questions). Where no answer changes it has no width: none of these examples lost, others may."
)
BILD = (
    "Speed: the rate of BiLD / that of speculative decoding. Faster: the interval lies above 1. Differences are to "
    f"plain generate(). {NO_LOSS} Open: faster, and no answer is worse by any measure, but the questions are too few."
)
DRAWN = (
    "Outputs are sampled, with the same seed for the same example in every repeat, and quality is that of one output "
    "per example. Lossless methods have the quality of plain decoding in expectation and differ from it by chance."
)


def render(result: Result) -> str:
    """The whole report."""
    parts = [heading(result), f"## Speedup by subtask\n\n{methods.SPEED}"]
    parts += [
        f"### Over {title}\n\n{speedup_table(result, which)}"
        for which, title in speed.BASELINES.items()
        if drafting_methods(result, which)
    ]
    parts.append(f"## All methods\n\n{methods.MACRO}\n\n### Overall\n\n{group_table(result, None)}")
    if len(labels(result)) > 1:
        parts += [f"### {label}\n\n{group_table(result, label)}" for label in labels(result)]
    parts.append(f"## Rounds\n\n{methods.ROUNDS}\n\n{methods.round_table(result, _groups(result), 'Subtask')}")
    parts.append(f"## Cold cost\n\n{methods.COLD}\n\n{methods.cold_table(result)}")
    if _both(result):
        parts.append(f"## BiLD and speculative decoding\n\n{BILD}\n\n{bild_table(result)}\n\n{count_line(result)}")
    if result["quality"]:
        drawn = f"{DRAWN}\n\n" if result["sampling"] else ""
        parts.append(f"## Quality against the references, 0 to 100\n\n{drawn}{quality_table(result)}")
        parts.append(f"### Differences to plain generate()\n\n{LOSS}\n\n{difference_table(result)}")
    if not result["sampling"]:
        parts.append(f"## Outputs that differ from plain generate()\n\n{divergence_table(result)}")
    return joined(parts, [average_alpha(result), *remarks(result)])


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
    plain = methods.plain_name(result)
    for label in (None, *labels(result)):
        lines.append("")
        prompts = prompts_of(result, label)
        base = number(speed.decode_rate(speed.calls_of(result, plain, prompts=prompts)), 1)
        for method in drafting_methods(result, "plain"):
            rate = number(speed.decode_rate(speed.calls_of(result, method["name"], prompts=prompts)), 1)
            gain = methods.over(result, method, "plain", prompts=prompts)
            lines.append(
                f"{label or 'Overall'} Result: AS: {base} tokens/sec, {SHORT[method['kind']]}: {rate} tokens/sec "
                f"-> {'–' if gain is None else f'{gain.value:.2f}'} X Speedup"
            )
    lines += ["", average_alpha(result)]
    lines += [count_line(result)] if _both(result) else []
    lines += remarks(result)
    return "\n".join(lines) + "\n"


def drafting_methods(result: Result, which: str) -> list[Mapping[str, Any]]:
    """All methods that have this baseline, except plain generate() and the baseline itself."""
    return [
        method
        for method in result["methods"]
        if method["kind"] != "plain" and methods.over(result, method, which, by="end to end") is not None
    ]


def speedup_table(result: Result, which: str) -> str:
    """One row per subtask and one column per method: micro speedups over a baseline."""
    shown = drafting_methods(result, which)
    rows = []
    for label in (*labels(result), None):
        prompts = prompts_of(result, label)
        cells = [ratio(methods.over(result, method, which, prompts=prompts)) for method in shown]
        rows.append([label or "overall", str(len(prompts)), *cells])
    return table(["Subtask", "Examples", *(capital(method["title"]) for method in shown)], rows)


def group_table(result: Result, label: str | None) -> str:
    """One row per method, for the examples of a subtask or for all."""
    return methods.speed_table(result, prompts=prompts_of(result, label), macro=True)


def quality_table(result: Result) -> str:
    """One row per subtask and method: the quality of outputs against the references."""
    titles = {method["name"]: capital(method["title"]) for method in result["methods"]}
    order = [*labels(result), None]
    rows = [
        [
            entry["subtask"] or "overall",
            titles[entry["method"]],
            str(entry["examples"]),
            *(number(entry.get(name), 1) for name in MEASURE_TITLES),
        ]
        for entry in sorted(result["quality"], key=lambda entry: order.index(entry["subtask"]))
    ]
    return table(["Subtask", "Method", "Examples", *MEASURE_TITLES.values()], rows)


def difference_table(result: Result) -> str:
    """One row per method: its change in quality over all examples."""
    plain, prompts = methods.plain_name(result), prompts_of(result, None)
    rows = []
    for method in result["methods"][1:]:
        found = [quality.difference(result, method["name"], plain, name, prompts) for name in tradeoff.JUDGED]
        rows.append([capital(method["title"]), *(difference(item) for item in found)])
    return table(["Method", *(MEASURE_TITLES[name] for name in tradeoff.JUDGED)], rows)


def divergence_table(result: Result) -> str:
    """One row per method: how many outputs differ from plain decoding's, where first, and how close the choice was."""
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
    """α over all examples, for each method that reports it."""
    values = []
    for method in result["methods"]:
        value = rounds.alpha(speed.calls_of(result, method["name"]))
        if value is not None:
            values.append(f"{SHORT[method['kind']]} {value:.3f}")
    return "Average alpha: " + (", ".join(values) if values else "– (nothing was drafted)")


def bild_table(result: Result) -> str:
    """One row per subtask: BiLD's speed over speculative decoding's, its change in quality over plain, the verdict."""
    rows = []
    for label in (*labels(result), None):
        found = tradeoff.verdict(result, label, "bild", "speculative")
        changes = [None if found.differences is None else found.differences[name] for name in tradeoff.JUDGED]
        examples = str(len(prompts_of(result, label)))
        rows.append(
            [label or "overall", examples, ratio(found.speed), *(difference(item) for item in changes), found.words]
        )
    header = ["Subtask", "Examples", "Speed of BiLD / speculative"]
    header += [f"{MEASURE_TITLES[name]}, BiLD − plain" for name in tradeoff.JUDGED]
    return table([*header, "Faster at no loss"], rows)


def count_line(result: Result) -> str:
    """A sentence: the number of subtasks on which BiLD is faster with quality kept, and at no loss."""
    found = tradeoff.verdicts(result, "bild", "speculative")
    count = tradeoff.won(found)
    if count is None:
        return "Whether BiLD loses quality is not known: the data have no references."
    bild = next(method["title"] for method in result["methods"] if method["name"] == "bild")
    excluded = sum(one.faster and one.as_good for one in found)
    without = sum(not one.known for one in found)
    rest = f"; {without} can't be judged, for want of references or rates" if without else ""
    return (
        f"{bild} is faster than speculative decoding on {count} of {len(found)} subtasks with no answer "
        f"worse, or a loss of more than one point excluded (excluded on {excluded}){rest}."
    )


def _groups(result: Result) -> dict[str, list[int]]:
    return {label or "overall": prompts_of(result, label) for label in (*labels(result), None)}


def _both(result: Result) -> bool:
    return {"bild", "speculative"} <= {method["name"] for method in result["methods"]}
