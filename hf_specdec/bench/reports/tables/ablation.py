"""The results of `ablation` as a table: pure functions from the dict that the JSON holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specdec.bench.figures import speed
from hf_specdec.bench.reports.heading import heading, remarks
from hf_specdec.bench.reports.markdown import mean_and_spread, number, percent, table
from hf_specdec.bench.reports.outputs import equal_outputs

Result = Mapping[str, Any]
_SWITCHES = ("speculative", "cache", "better_transformer")

LEGEND = (
    "Tokens/Sec: after the first delivery, micro (all tokens / all seconds); each figure is the mean of the repeats ± "
    "their standard deviation. Speedups compare the examples that have a rate in both rows, so the ratio of two rates "
    "shown may differ. Rows without Better Transformer use eager attention in both models. The first speedup "
    "is over the row without any of the three, the second over the same row without speculation: what speculation "
    "itself brings."
)


def render(result: Result) -> str:
    """The whole report."""
    parts = [heading(result), LEGEND, ablation_table(result), *(f"- {line}" for line in remarks(result))]
    return "\n\n".join(parts) + "\n"


def terminal(result: Result) -> str:
    """The table and what has to be said about it."""
    return "\n\n".join([ablation_table(result), *remarks(result)]) + "\n"


def ablation_table(result: Result) -> str:
    """One row a combination."""
    header = ["Speculative decoding", "KV cache", "Better Transformer", "Tokens/Sec", "Speedup over none of them"]
    header += [
        "Speedup of speculation",
        "Tokens/Sec (end to end)",
        "Acceptance",
        "Tokens/Round",
        "Outputs as the first",
    ]
    return table(header, [_row(result, method) for method in result["methods"]])


def _row(result: Result, method: Mapping[str, Any]) -> list[str]:
    runs, name = result["runs"], method["name"]
    mine = [run for run in runs if run["method"] == name]
    repeats = speed.by_repeat(runs, name)
    rates = [rate for one in repeats if (rate := speed.micro_rate(one)) is not None]
    by_speculation = "–"
    if method["speculative"]:
        by_speculation = mean_and_spread(speed.speedup_by_repeat(runs, name, _without_speculation(result, method)), 2)
    return [
        *("yes" if method[switch] else "no" for switch in _SWITCHES),
        mean_and_spread(rates, 1),
        mean_and_spread(speed.speedup_by_repeat(runs, name, result["methods"][0]["name"]), 2),
        by_speculation,
        mean_and_spread([speed.end_to_end_rate(one) for one in repeats], 1),
        percent(speed.acceptance_rate(mine)),
        number(speed.tokens_per_round(mine), 2),
        equal_outputs(result, name, result["methods"][0]["name"]),
    ]


def _without_speculation(result: Result, method: Mapping[str, Any]) -> str:
    """The name of the row that differs in speculation only."""
    return next(
        str(other["name"])
        for other in result["methods"]
        if not other["speculative"] and all(other[switch] == method[switch] for switch in _SWITCHES[1:])
    )
