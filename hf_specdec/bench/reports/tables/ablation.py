"""Tables of the task ablation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specdec.bench.figures import rounds, speed
from hf_specdec.bench.reports.heading import heading, remarks
from hf_specdec.bench.reports.markdown import number, percent, ratio, table
from hf_specdec.bench.reports.outputs import equal_outputs

Result = Mapping[str, Any]
MethodDict = Mapping[str, Any]
SWITCHES = ("speculative", "cache", "better_transformer")

LEGEND = (
    "Tokens/Sec counts the tokens after the first delivery, summed over all examples and repeats (micro). In brackets: "
    "95% interval, by a paired bootstrap over examples and repeats. Rows without Better Transformer use eager "
    "attention in both models."
)


def render(result: Result) -> str:
    """The whole report."""
    parts = [heading(result), LEGEND, ablation_table(result), *(f"- {line}" for line in remarks(result))]
    return "\n\n".join(parts) + "\n"


def terminal(result: Result) -> str:
    """The table and the remarks."""
    return "\n\n".join([ablation_table(result), *remarks(result)]) + "\n"


def ablation_table(result: Result) -> str:
    """One row a combination."""
    header = ["Speculative decoding", "KV cache", "Better Transformer", "Method", "Tokens/Sec"]
    header += ["Speedup over the first row", "Speedup over the same row without a draft", "Tokens/Sec, end to end"]
    header += ["Acceptance", "Tokens/Round", "Outputs as the first row's"]
    return table(header, [_row(result, method) for method in result["methods"]])


def without_draft(result: Result, method: MethodDict) -> str | None:
    """The name of the row that differs in speculation only; None for rows without a draft."""
    if not method["speculative"]:
        return None
    return next(
        str(other["name"])
        for other in result["methods"]
        if not other["speculative"] and all(other[switch] == method[switch] for switch in SWITCHES[1:])
    )


def _row(result: Result, method: MethodDict) -> list[str]:
    name, first, base = method["name"], result["methods"][0]["name"], without_draft(result, method)
    calls = speed.calls_of(result, name)
    return [
        *("yes" if method[switch] else "no" for switch in SWITCHES),
        method["title"],
        number(speed.decode_rate(calls), 1),
        "–" if name == first else ratio(speed.speedup(result, name, first)),
        ratio(None if base is None else speed.speedup(result, name, base)),
        number(speed.end_to_end_rate(calls), 1),
        percent(rounds.acceptance_rate(calls)),
        number(rounds.tokens_per_round(calls), 2),
        equal_outputs(result, name, first),
    ]
