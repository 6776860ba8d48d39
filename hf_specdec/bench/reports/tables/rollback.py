"""Tables of the task rollback."""

from __future__ import annotations

from statistics import median

from hf_specdec.bench.figures import passes, rounds, speed
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports.heading import heading, joined, remarks
from hf_specdec.bench.reports.markdown import number, table
from hf_specdec.bench.reports.tables import methods
from hf_specdec.bench.reports.tables.benchmark import chosen_method

MB = 1e6

LEGEND = (
    "A recurrent layer holds one state for the whole text, which can't be cut. Token by token: the recurrence runs "
    "token by token over the drafts, and one of the states is picked (what the package does). Replay: it runs at once, "
    "and again from the old state over the tokens that stay. Checkpoint: it runs at once, and the next pass reads the "
    "tokens that stay again together with its own drafts. In brackets: in target passes over one token. Bytes: states "
    "of recurrences, and the inputs that replay needs. Predicted: the speedup over plain decoding on the same engine "
    "that α, the draft's step and these passes give."
)


def render(result: Result) -> str:
    """The whole report."""
    rejected, lookahead = (result["rollback"][name] for name in ("rejected", "lookahead"))
    parts = [
        heading(result),
        f"## {rejected} of {lookahead} drafts rejected\n\n{LEGEND}\n\n{rollback_table(result)}",
        f"## Decoding\n\n{methods.SPEED}\n\n{methods.speed_table(result)}",
        f"{methods.ROUNDS}\n\n{methods.round_table(result, {'all': None}, 'Prompts')}",
    ]
    return joined(parts, remarks(result))


def rollback_table(result: Result) -> str:
    """One row for each way to take rejected drafts back."""
    times = {name: median(values) for name, values in result["rollback"]["seconds"].items()}
    ways = {
        "Token by token": ("steps", times["steps"], times["picking"]),
        "Replay": ("replay", times["verification"], times["replay"]),
        "Checkpoint": ("checkpoint", times["checkpoint"], 0.0),
    }
    step = times["single"]
    rows = [
        [
            title,
            *(f"{1000 * seconds:.1f} ({seconds / step:.2f})" for seconds in (verification, rollback)),
            number(result["rollback"]["bytes"][way] / MB, 1),
            number(_predicted(result, step, verification + rollback), 2),
        ]
        for title, (way, verification, rollback) in ways.items()
    ]
    lookahead = result["rollback"]["lookahead"]
    header = ["", f"Verification of {lookahead + 1} tokens (ms)", "Rollback (ms)", "Kept (MB)", "Predicted speedup"]
    return table(header, rows)


def _predicted(result: Result, step: float, verification: float) -> float | None:
    """The speedup if a verification, its rollback included, takes this many seconds."""
    method = chosen_method(result)
    calls = speed.calls_of(result, method["name"])
    alpha, bare = rounds.alpha(calls), passes.costs_of(result, method, calls)
    if alpha is None or bare is None:
        return None
    return passes.predicted_speedup(alpha, bare.drafting(1) / step, verification / step, method["lookahead"])
