"""Tables that the tasks share, one row per method: speed, rounds, bare passes and cold cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_specdec.bench.figures import passes, rounds, speed
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports.equal_outputs import equal_outputs
from hf_specdec.bench.reports.markdown import approximate, capital, number, percent, ratio, table

Prompts = Sequence[int] | None

SPEED = (
    "Tokens/Sec: tokens / seconds after the first delivery (the first token; with a draft, the first round), summed "
    "over all examples and repeats (micro). Speedups: ratios of these rates on the same examples, over the baseline "
    "that the column names. In brackets: 95% interval, paired bootstrap; a method is faster where it lies above 1. The "
    "same engine: our loop without a draft, same compile mode and cache. γ: tokens drafted in a round. End to end "
    "includes the prompt."
)
MACRO = (
    "Macro is computed as in Spec-Bench's script: the mean over questions of new tokens / wall time, all turns and "
    "their prompts included."
)
ROUNDS = (
    "Acceptance: accepted / drafted tokens. Tokens/Round includes the target's own token. α: mean overlap of both "
    "distributions (Leviathan et al. 2023). η: time that the bare passes of the same engine need / measured time. "
    "Predicted: the speedup over plain decoding on the same engine that α and the bare passes give, with acceptance "
    "taken as independent from token to token; an estimate. Overhead: a round's time outside both models."
)
PASSES = (
    "Medians of bare forward passes. c: one draft step / one target step. v: verifying the lookahead + 1 tokens / one "
    "target step."
)
COLD = (
    "Cold: extra time of the warm-up calls over as many warm ones, for recording, capturing and compiling passes. "
    "Methods on an engine share this work, so each row includes the rows above it: an upper bound for the method "
    "alone. Pays after: new tokens until a method has made up for loading its draft and for its longer cold start "
    "than plain generate(); – where it is no faster."
)


def shown_methods(result: Result, prompts: Prompts = None, batch: int | None = None) -> list[Mapping[str, Any]]:
    """The methods that ran on these prompts at this batch size."""
    return [m for m in result["methods"] if speed.calls_of(result, m["name"], prompts=prompts, batch=batch)]


def plain_name(result: Result) -> str:
    """The name of the row that is plain generate()."""
    return next(str(method["name"]) for method in result["methods"] if method["kind"] == "plain")


def over(
    result: Result,
    method: Mapping[str, Any],
    which: str,
    *,
    prompts: Prompts = None,
    batch: int | None = None,
    by: str = "micro",
) -> speed.Ratio | None:
    """The speedup over a baseline; None if there is none, and for the baseline itself."""
    base = speed.baseline(result, method, which, batch)
    if base is None and which == "plain" and method["kind"] != "plain":
        # Without a decode rate there is no fastest row, but there are times from end to end.
        base = speed.method_named(result, plain_name(result))
    if base is None:
        return None
    return speed.speedup(result, method["name"], base["name"], prompts=prompts, batch=batch, by=by)


def speed_table(result: Result, *, prompts: Prompts = None, batch: int | None = None, macro: bool = False) -> str:
    """Rates and speedups over each baseline."""
    header = ["Method", "Tokens/Sec", *(f"Speedup over {title}" for title in speed.BASELINES.values())]
    header += ["Macro speedup over plain generate()"] if macro else []
    header += ["Tokens/Sec, end to end", "Outputs as plain"]
    rows = []
    for method in shown_methods(result, prompts, batch):
        calls = speed.calls_of(result, method["name"], prompts=prompts, batch=batch)
        cells = [capital(method["title"]), number(speed.decode_rate(calls), 1)]
        cells += [ratio(over(result, method, which, prompts=prompts, batch=batch)) for which in speed.BASELINES]
        if macro:
            cells.append(ratio(over(result, method, "plain", prompts=prompts, batch=batch, by="macro")))
        cells.append(number(speed.end_to_end_rate(calls), 1))
        cells.append(equal_outputs(result, method["name"], plain_name(result), prompts=prompts, batch=batch))
        rows.append(cells)
    return table(header, rows)


def round_table(result: Result, groups: Mapping[str, Prompts], group: str, batch: int | None = None) -> str:
    """The rounds of each drafting method, one row per group of prompts and method."""
    header = [
        group,
        "Method",
        "Acceptance",
        "Tokens/Round",
        "α",
        "η",
        "Predicted speedup over plain on the same engine",
    ]
    header += ["Measured", "Draft steps/Round", "Draft (ms)", "Verification (ms)", "Overhead (ms)"]
    rows = []
    for name, prompts in groups.items():
        for method in shown_methods(result, prompts, batch):
            calls = speed.calls_of(result, method["name"], prompts=prompts, batch=batch)
            if rounds.acceptance_rate(calls) is None:
                continue
            # The engine of transformers' own loops is generate().
            which = "plain" if method["same_engine"] is None else "engine"
            measured = over(result, method, which, prompts=prompts, batch=batch)
            rows.append(
                [
                    name,
                    capital(method["title"]),
                    percent(rounds.acceptance_rate(calls)),
                    number(rounds.tokens_per_round(calls), 2),
                    number(rounds.alpha(calls), 3),
                    number(passes.efficiency(result, calls), 2),
                    number(passes.predicted(result, method, batch or 1, prompts), 2),
                    "–" if measured is None else f"{measured.value:.2f}",
                    *_times(calls),
                ]
            )
    return table(header, rows)


def _times(calls: Sequence[Any]) -> list[str]:
    """Per round: draft steps, and milliseconds of draft, verification and overhead."""
    found = rounds.time_per_round(calls)
    if found is None:
        return ["–"] * 4
    parts = [1000 * found[key] for key in ("draft", "verify", "overhead")]
    return [number(found["draft_steps"], 2), *(number(part, 2) for part in parts)]


def pass_table(result: Result, batch: int = 1) -> str:
    """Bare passes by engine, draft and prompt length."""
    header = ["Engine", "Draft", "Prompt Length (tokens)", "Lookahead", "Draft step (ms)", "Target step (ms)"]
    header += ["Verification (ms)", "c", "v"]
    rows = []
    for engine, draft, lookahead in _passes_used(result, batch):
        for length, costs in sorted(passes.costs(result, engine, batch, draft).items()):
            c, v = costs.ratios(lookahead)
            step = costs.target[1]
            milliseconds = [number(1000 * value, 2) for value in (c * step, step, v * step)]
            cells = [engine, str(draft), str(length), str(lookahead), *milliseconds]
            rows.append([*cells, number(c, 3), number(v, 3)])
    return table(header, rows)


def _passes_used(result: Result, batch: int) -> list[tuple[str, str, int]]:
    """(engine, draft, lookahead) of our methods with a constant lookahead."""
    shown = [m for m in shown_methods(result, batch=batch) if m["same_engine"] and isinstance(m["lookahead"], int)]
    return list(dict.fromkeys((m["engine"], m["draft"], m["lookahead"]) for m in shown if m["draft"]))


def cold_table(result: Result, batch: int = 1) -> str:
    """How long the calls before the warm ones took, and after how many tokens this has paid off."""
    rows = []
    for method in shown_methods(result, batch=batch):
        cold, base = speed.cold_seconds(result, method["name"], batch), speed.baseline(result, method, "plain", batch)
        pays = None
        if base is not None and base["name"] != method["name"]:
            pays = speed.tokens_until_it_pays(result, method["name"], base["name"], batch)
        rows.append([capital(method["title"]), number(cold, 2), approximate(pays)])
    return table(["Method", "Cold (s)", "Pays after (tokens)"], rows)
