"""Tables of the task ablation."""

from __future__ import annotations

from hf_specdec.bench.figures import rounds, speed
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.reports.equal_outputs import equal_outputs
from hf_specdec.bench.reports.heading import heading, remarks
from hf_specdec.bench.reports.markdown import capital, number, percent, ratio, table

SWITCHES = ("speculative", "cache", "better_transformer")
# Baselines with the same cache and attention, by column.
_SAME_SWITCHES = {
    "Speedup over plain generate(), same cache and attention": "plain",
    "Speedup over plain on the same engine, same cache and attention": "none",
}

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
    """One row per combination."""
    header = ["Method", "Speculative decoding", "KV cache", "Better Transformer", "Tokens/Sec"]
    header += ["Speedup over the first row", *_SAME_SWITCHES, "Tokens/Sec, end to end"]
    header += ["Acceptance", "Tokens/Round", "Outputs as the first row's"]
    return table(header, [_row(result, method) for method in result["methods"]])


def base_of(result: Result, method: MethodDict, kind: str) -> str | None:
    """The name of the row of a kind ("plain" or "none") with the same cache and attention; None for itself.

    "none" is plain decoding on the same engine, which transformers' own loops don't have.
    """
    if kind == method["kind"] or (kind == "none" and method["same_engine"] is None):
        return None
    same = (m for m in result["methods"] if m["kind"] == kind and all(m[s] == method[s] for s in SWITCHES[1:]))
    return next((str(other["name"]) for other in same), None)


def short_title(method: MethodDict) -> str:
    """The title without cache and attention, which have columns of their own."""
    return capital(method["title"].split(", with")[0])


def _row(result: Result, method: MethodDict) -> list[str]:
    name, first = method["name"], result["methods"][0]["name"]
    bases = [base_of(result, method, kind) for kind in _SAME_SWITCHES.values()]
    calls = speed.calls_of(result, name)
    return [
        short_title(method),
        *("yes" if method[switch] else "no" for switch in SWITCHES),
        number(speed.decode_rate(calls), 1),
        "–" if name == first else ratio(speed.speedup(result, name, first)),
        *(ratio(None if base is None else speed.speedup(result, name, base)) for base in bases),
        number(speed.end_to_end_rate(calls), 1),
        percent(rounds.acceptance_rate(calls)),
        number(rounds.tokens_per_round(calls), 2),
        equal_outputs(result, name, first),
    ]
