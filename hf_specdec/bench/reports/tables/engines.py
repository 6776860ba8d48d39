"""The results of `engines` as tables: pure functions from the dict that the JSON holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specdec.bench.figures import bandwidth, engine_speed, speed
from hf_specdec.bench.figures.engine_speed import Ratio, over_plain_on_engine, ratio, runs_of
from hf_specdec.bench.reports.heading import heading
from hf_specdec.bench.reports.markdown import capital, number, percent, table
from hf_specdec.bench.reports.outputs import equal_outputs
from hf_specdec.bench.running.engine_passes import RECORDED

Result = Mapping[str, Any]
MethodDict = Mapping[str, Any]

LEGEND = (
    "Tokens/Sec: tokens of all rows after the first delivery / seconds after it, micro over the prompts, the median of "
    "the repeats; no text ends early, so that all methods decode the same number of tokens. Speedups: the median of "
    "the repeats' own ratios (their extremes). Transformers' best is the fastest of its settings in this run. "
    "Tokens/Round counts, row by row, the rounds in which the row had not ended. η: bare passes on the same engine and "
    "shapes / measured time; of the eager engine they are calls of the models, which take longer than the recorded "
    "passes that our loop makes on a CPU, so that η may be above 1; η, recorded: of these. Where passes are compiled "
    "or captured, they choose and judge tokens, too; in batches all rows are counted, so that η is too high where rows "
    "that have ended are left out. First call: the first of two "
    "that warm up, where compiling and capturing happen."
)
ALLOWED = (
    "α, c and v are measured at that batch size, c and v by bare passes on the method's own engine: a draft step and a "
    "verification of γ + 1 tokens, each over one target step. Allowed is what they allow over plain decoding on the "
    "same engine, (1 - α^(γ+1)) / ((1 - α)(γc + v)), as if no row ever waited for another; Share is the measured "
    "speedup over plain decoding on the same engine (eager: plain generate()) / Allowed. Waiting: the share of "
    "row-rounds in which a row had ended and the batch's slowest had not; compiled and captured rounds go on computing "
    "such rows, others leave them out."
)


def render(result: Result) -> str:
    """The whole report."""
    parts = [heading(result), LEGEND]
    for batch in batch_sizes(result):
        parts.append(f"## Batch size {batch}\n\n{method_table(result, batch)}")
    parts.append(f"## What α, c and v allow\n\n{ALLOWED}\n\n{allowed_table(result)}")
    parts.append("\n".join(f"- {line}" for line in remarks(result)))
    return "\n\n".join(parts) + "\n"


def batch_sizes(result: Result) -> list[int]:
    """Ascending."""
    return sorted({run["batch"] for run in result["runs"]})


def method_table(result: Result, batch: int) -> str:
    """One row a method that ran at this batch size."""
    header = ["Method", "Tokens/Sec", "Over plain generate()", "Over transformers' best", "Over plain on its engine"]
    header += ["Acceptance", "Tokens/Round", "α", "η", "η, recorded", "First call (s)", "Outputs as plain"]
    best = engine_speed.fastest(result, batch, kind="assisted")
    rows = []
    for method in result["methods"]:
        runs = runs_of(result, method["name"], batch)
        if not runs:
            continue
        rounds = engine_speed.by_row(runs)
        passes = engine_speed.costs(result, method["engine"], batch)
        recorded = engine_speed.costs(result, RECORDED, batch) if _is_recorded(method) else None
        # The draft of the floor is the target, whose passes as a draft were not timed.
        eta = None if method["kind"] == "floor" else engine_speed.efficiency(runs, passes)
        rows.append(
            [
                capital(method["title"]),
                number(engine_speed.typical_rate(runs), 1),
                written(ratio(runs, runs_of(result, "plain", batch))),
                written(None if best is None else ratio(runs, runs_of(result, best["name"], batch))),
                written(None if method["engine"] == "eager" else over_plain_on_engine(result, method, batch)),
                percent(speed.acceptance_rate(rounds)),
                number(speed.tokens_per_round(rounds), 2),
                number(speed.alpha(rounds), 3),
                number(eta, 2),
                number(engine_speed.efficiency(runs, recorded), 2),
                number(_first_call(result, method["name"], batch), 1),
                equal_outputs(result, method["name"], batch=batch),
            ]
        )
    return table(header, rows)


def allowed_table(result: Result) -> str:
    """One row a batch size and a method of ours with a fixed lookahead."""
    header = ["Batch size", "Engine", "Lookahead", "α", "c", "v", "Tokens/Round", "Waiting"]
    header += ["Allowed", "Measured", "Share"]
    rows = []
    for batch in batch_sizes(result):
        for method in result["methods"]:
            runs = runs_of(result, method["name"], batch)
            passes = engine_speed.costs(result, method["engine"], batch)
            if method["kind"] != "fixed" or not runs or passes is None:
                continue
            rounds = engine_speed.by_row(runs)
            c, v = passes.ratios(method["lookahead"])
            measured = over_plain_on_engine(result, method, batch)
            rows.append(
                [
                    str(batch),
                    method["engine"],
                    str(method["lookahead"]),
                    number(speed.alpha(rounds), 3),
                    number(c, 3),
                    number(v, 3),
                    number(speed.tokens_per_round(rounds), 2),
                    percent(engine_speed.waiting(runs)),
                    number(engine_speed.allowed(result, method, batch), 2),
                    number(None if measured is None else measured.middle, 2),
                    number(engine_speed.share_of_allowed(result, method, batch), 2),
                ]
            )
    return table(header, rows)


def remarks(result: Result) -> list[str]:
    """Transformers' best setting, where drafting stops paying, the share of the memory's bandwidth, and notes."""
    lines = list(result["notes"])
    best = engine_speed.fastest(result, 1, kind="assisted")
    if best is not None:
        lines.append(f"Transformers' best setting here: {best['title'].split(', ', 1)[-1]}.")
    sizes = batch_sizes(result)
    for engine in dict.fromkeys(m["engine"] for m in result["methods"] if m["kind"] == "none"):
        end = engine_speed.break_even(result, engine)
        where = f"up to {sizes[-1]}, the largest tried" if end is None else f"below {end}, where it stops paying"
        lines.append(f"Drafting pays over plain decoding on the {engine} engine at batch sizes {where}.")
    lines += _bandwidth_lines(result)
    return lines


def written(value: Ratio | None) -> str:
    """A ratio with the extremes of its repeats, where they differ."""
    if value is None:
        return "–"
    spread = "" if value.low == value.high else f" ({value.low:.2f} to {value.high:.2f})"
    return f"{value.middle:.2f}{spread}"


def _bandwidth_lines(result: Result) -> list[str]:
    """What share of the memory's bandwidth plain decoding reaches; nothing on a CPU, whose caches hold small models."""
    memory = result["memory"]
    if result["models"]["target"]["device"].startswith("cpu") or 1 not in batch_sizes(result):
        return []
    read = memory["weight_bytes"] + (memory["cache_bytes"] or 0)
    lines = [
        f"A step at batch size 1 reads {read / 1e9:.2f} GB (weights, and the cache of {memory['context']} tokens); the "
        f"device copies {memory['copy_bytes_per_second'] / 1e9:.0f} GB/s, reading and writing counted."
    ]
    for method in (m for m in result["methods"] if m["kind"] in ("plain", "none")):
        speed = engine_speed.typical_rate(runs_of(result, method["name"], 1))
        share = None if speed is None else bandwidth.share(speed, memory)
        lines.append(f"{capital(method['title'])} reaches {percent(share)} of that limit.")
    return lines


def _is_recorded(method: MethodDict) -> bool:
    return method["engine"] == "eager" and method["kind"] in ("none", *engine_speed.DRAFTING)


def _first_call(result: Result, name: str, batch: int) -> float | None:
    """Seconds of the first call at a batch size, of the first prompt length."""
    calls = [item for item in result["first_calls"] if (item["method"], item["batch"]) == (name, batch)]
    return calls[0]["seconds"] if calls else None
