"""Which pictures a result has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from hf_specdec.bench.reports.pictures import ablation, benchmark, engines, rounds, subtasks, sweep, tradeoff
from hf_specdec.bench.reports.rendering import synthetic_pair
from hf_specdec.bench.reports.tables.sweep import methods_of

Result = Mapping[str, Any]


def pictures(result: Result) -> dict[str, Figure]:
    """The pictures of a result by what they show; none of what it does not hold."""
    task = result["task"]
    found: dict[str, Figure] = {}
    if task == "benchmark" and len(result["methods"]) > 1:
        found["speed-by-length"] = benchmark.speed_by_length(result)
    if task == "subtasks":
        found["speedup-by-subtask"] = subtasks.speedup_by_subtask(result)
    if task == "engines":
        found["speed-by-method"] = engines.speed_by_method(result)
        if len({run["batch"] for run in result["runs"]}) > 1:
            found["speed-by-batch"] = engines.speed_by_batch(result)
    if task == "ablation":
        found["speed"] = ablation.ablation_bars(result)
    if task == "sweep":
        if len({method["lookahead"] for method in methods_of(result, "speculative")}) > 1:
            found["speedup-over-lookahead"] = sweep.speedup_over_lookahead(result)
        for draft, lookahead in dict.fromkeys((m["draft"], m["lookahead"]) for m in methods_of(result, "bild")):
            name = f"thresholds-{draft.rstrip('/').rsplit('/', 1)[-1]}-{lookahead}"
            found[name] = sweep.threshold_maps(result, draft, lookahead)
    lossy = any(method.get("strategy", method["name"]) == "bild" for method in result["methods"])
    if task in ("sweep", "subtasks") and result["quality"] and lossy:
        found["speed-against-quality"] = tradeoff.speed_against_quality(result)
    if task in ("benchmark", "subtasks"):
        runs = [run for run in result["runs"] if run["rounds"]]
        if any(item["seconds"] is not None for run in runs for item in run["rounds"][1:]):
            found["time-per-round"] = rounds.time_per_round(result)
        if any(item["drafted"] for run in runs for item in run["rounds"]):
            found["acceptance-by-position"] = rounds.acceptance_by_position(result)
    if synthetic_pair(result):
        for figure in found.values():
            figure.axes[0].set_title("Synthetic pair, acceptance imposed\n" + figure.axes[0].get_title())
    return found
