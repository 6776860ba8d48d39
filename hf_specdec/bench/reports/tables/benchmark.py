"""Raw results to markdown: pure functions from the dict that the JSON holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from hf_specdec.bench.figures import speed
from hf_specdec.bench.reports.heading import heading, remarks
from hf_specdec.bench.reports.markdown import capital, number, percent, table
from hf_specdec.bench.reports.outputs import differences, equal_outputs

Result = Mapping[str, Any]

_COLUMNS = [
    "Example#",
    "Prompt Length (tokens)",
    "New Tokens Generated",
    "Total Time (s)",
    "Prefill Phase (ms)",
    "Time/Token (ms)",
    "Tokens/Sec",
]
_ASSISTED_COLUMNS = ["Acceptance", "Tokens/Round"]


def render(result: Result) -> str:
    """The whole report of a `benchmark` or `decode` result."""
    parts = [heading(result), _legend(result)]
    parts += [
        f"## {capital(method['title'])}\n\n{example_table(result, method['name'])}" for method in result["methods"]
    ]
    if len(result["methods"]) > 1:
        parts += [
            f"## Summary\n\n{summary_table(result)}",
            f"## Costs of a round\n\n{cost_table(result)}",
            "## Speedup\n\n" + "\n".join(f"- {line}" for line in conclusions(result)),
        ]
    else:
        parts += [f"- {line}" for line in remarks(result)]
    return "\n\n".join(parts) + "\n"


def example_table(result: Result, method: str) -> str:
    """One row an example and one for all of them; the last columns only for methods that draft."""
    runs = speed.typical_runs(result["runs"], method)
    drafting = any(run["rounds"] is not None for run in runs.values())
    lengths = _lengths(result)
    rows = [_row(str(prompt + 1), str(lengths[prompt]), [run], drafting) for prompt, run in runs.items()]
    rows.append(_row("all", "", list(runs.values()), drafting))
    return table(_COLUMNS + (_ASSISTED_COLUMNS if drafting else []), rows)


def summary_table(result: Result) -> str:
    """One row a method: rates, acceptance, efficiency, and whether outputs equal those of plain decoding."""
    rows = []
    forwards = _forwards_by_prompt(result)
    for method in result["methods"]:
        runs = speed.typical_runs(result["runs"], method["name"])
        listed = list(runs.values())
        rows.append(
            [
                capital(method["title"]),
                number(speed.micro_rate(listed), 1),
                number(speed.macro_rate(listed), 1),
                number(speed.end_to_end_rate(listed), 1),
                percent(speed.acceptance_rate(listed)),
                number(speed.tokens_per_round(listed), 2),
                number(speed.alpha(listed), 3),
                number(speed.efficiency(listed, forwards), 2),
                equal_outputs(result, method["name"]),
            ]
        )
    header = ["Method", "Tokens/Sec (micro)", "Tokens/Sec (macro)", "Tokens/Sec (end to end)", "Acceptance"]
    return table([*header, "Tokens/Round", "α", "η", "Outputs as plain"], rows)


def cost_table(result: Result) -> str:
    """Raw forward times by prompt length, and beside each method's measured speedup the one they predict."""
    lookahead = result["lookahead"]
    header = [
        "Prompt Length (tokens)",
        "Draft step (ms)",
        "Target step (ms)",
        f"Verification of {lookahead + 1} (ms)",
    ]
    header += ["c", "v", "Method", "α", "Predicted speedup", "Measured speedup"]
    lengths = _lengths(result)
    rows = []
    for length, forwards in result["raw_forwards"].items():
        prompts = [prompt for prompt, tokens in lengths.items() if str(tokens) == length]
        c, v = speed.cost_ratios(forwards, lookahead)
        verification = forwards["target"][str(lookahead + 1)]
        raw = (forwards["draft_step"], forwards["target"]["1"], verification)
        costs = [number(1000 * median(times), 2) for times in raw] + [number(c, 3), number(v, 3)]
        for method in result["methods"][1:]:
            runs = speed.typical_runs(result["runs"], method["name"], prompts)
            alpha = speed.alpha(runs.values())
            predicted = None
            # BiLD's rounds have no fixed length, which the formula takes for granted.
            if alpha is not None and method["name"] != "bild":
                predicted = speed.predicted_speedup(alpha, c, v, lookahead)
            measured = speed.middle(speed.speedup_by_repeat(result["runs"], method["name"], "plain", prompts))
            figures = [number(alpha, 3), number(predicted, 2), number(measured, 2)]
            rows.append([length, *costs, capital(method["title"]), *figures])
    return table(header, rows)


def conclusions(result: Result) -> list[str]:
    """Sentences: equality of outputs, the estimate's limits, disturbed times, and last the speedups."""
    _, chosen, *others = result["methods"]
    lines = [
        f"Outputs of {method['title']}: {_same_outputs_in_words(result, method['name'])}."
        for method in [chosen, *others]
    ]
    lines.append(
        "The predicted speedup is an estimate: it takes each token's acceptance for independent of the "
        "others', and counts forward passes only. η is the share of the decoding time that those passes need (above 1: "
        "recorded passes take less than those, or they were timed in a worse moment than the run)."
    )
    lines += remarks(result)
    lines += [_speedup_in_words(result, chosen, baseline) for baseline in [result["methods"][0], *others]]
    return lines


def _row(name: str, length: str, runs: Sequence[speed.RunDict], drafting: bool) -> list[str]:
    rate = speed.micro_rate(runs)
    prefill = mean(speed.first_delivery(run)[0] for run in runs)
    cells = [
        name,
        length,
        str(sum(len(run["tokens"]) for run in runs)),
        number(sum(run["seconds"] for run in runs), 3),
        number(1000 * prefill, 2),
        number(None if rate is None else 1000 / rate, 2),
        number(rate, 1),
    ]
    if drafting:
        cells += [percent(speed.acceptance_rate(runs)), number(speed.tokens_per_round(runs), 2)]
    return cells


def _legend(result: Result) -> str:
    text = (
        "Prefill runs from the call to the first delivery (one token in plain decoding, up to lookahead + 1 "
        "with a draft); Time/Token and Tokens/Sec count what came after it, – where nothing did. The row "
        "`all` is micro: all tokens / all seconds (its prefill: the mean)."
    )
    if result["arguments"]["repeats"] > 1:
        text += " Each row is the repeat with the median total time. Speedups: the median of the repeats' own."
    return text


def _lengths(result: Result) -> dict[int, int]:
    return {prompt["index"]: prompt["tokens"] for prompt in result["prompts"]}


def _forwards_by_prompt(result: Result) -> dict[int, Mapping[str, Any]]:
    return {prompt: result["raw_forwards"][str(length)] for prompt, length in _lengths(result).items()}


def _same_outputs_in_words(result: Result, method: str) -> str:
    if result["sampling"]:
        return "drawn, so not compared token by token"
    found = differences(result, method)
    if not found:
        return "equal to plain decoding's on every example"
    where = ", ".join(f"example {prompt + 1} at token {position + 1}" for (_, prompt, _), position in found)
    return f"{equal_outputs(result, method)} equal plain decoding's; first differences: {where}"


def _speedup_in_words(result: Result, method: Mapping[str, str], baseline: Mapping[str, str]) -> str:
    names = method["name"], baseline["name"]
    ratios = speed.speedup_by_repeat(result["runs"], *names)
    named = f"Speedup of {method['title']} over {baseline['title']}"
    ends = speed.speedup_by_repeat(result["runs"], *names, ratio=speed.end_to_end_speedup)
    end_to_end = f"end to end {median(ends):.2f}"
    if not ratios:
        return f"{named}: no example had tokens after its first delivery; {end_to_end}."
    within = f"; {min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} repeats" if len(ratios) > 1 else ""
    return f"{named}: **{median(ratios):.2f}** (decode tokens/s, micro{within}); {end_to_end}."
