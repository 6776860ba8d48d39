"""What was asked of each engine, beside what a run of `engines` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_specdec.bench.figures import bandwidth, engine_speed
from hf_specdec.bench.figures.engine_speed import DRAFTING, Ratio, fastest, ratio, runs_of
from hf_specdec.bench.reports.markdown import number, table

Result = Mapping[str, Any]
MethodDict = Mapping[str, Any]

_FAST_ENGINES = ("static", "compiled")
_LONG_ENOUGH = 128  # new tokens, for the floor to be judged


@dataclass(frozen=True)
class Goal:
    """One line: what is measured, of which method, how much was asked for, and what it came to (None: not run)."""

    measure: str
    method: str
    least: float
    measured: float | None
    low: float | None = None
    high: float | None = None


def asked_table(result: Result) -> str:
    """Every goal of the device that the run was made on."""
    rows = []
    for goal in goals(result):
        held = "–" if goal.measured is None else "yes" if goal.measured >= goal.least else "no"
        spread = "–" if goal.low is None else f"{goal.low:.2f} to {goal.high:.2f}"
        cells = [goal.measure, goal.method, f"{goal.least:.2f}", number(goal.measured, 2), spread, held]
        rows.append(cells)
    return table(["Measure", "Of", "At least", "Measured", "Over repeats", "Held"], rows)


def goals(result: Result) -> list[Goal]:
    """On a CPU those of the eager and the compiled engine, on a GPU those of the fastest; and the floor on both."""
    on_cpu = result["models"]["target"]["device"].startswith("cpu")
    found = _cpu_goals(result) if on_cpu else _gpu_goals(result)
    return [*found, _floor(result)]


def _cpu_goals(result: Result) -> list[Goal]:
    greedy = not result["sampling"]
    least = {
        "eager": {"assisted": 1.3 if greedy else 1.5, "plain": 1.5, "eta": 0.90},
        "compiled": {"assisted": 2.0, "plain": 2.5, "same": 1.5, "eta": 0.85},
    }
    found = []
    for engine, asked in least.items():
        ours = fastest(result, 1, kind=DRAFTING, engine=engine)
        if ours is None:
            continue
        theirs = fastest(result, 1, kind="assisted")
        found.append(_over(result, ours, theirs, f"{engine}, over transformers' best", asked["assisted"]))
        found.append(_over(result, ours, fastest(result, 1, kind="plain"), f"{engine}, over plain", asked["plain"]))
        if "same" in asked:
            same = engine_speed.plain_on(result, engine, 1)
            found.append(_over(result, ours, same, f"{engine}, over plain on the same engine", asked["same"]))
        passes = engine_speed.costs(result, engine, 1)
        eta = engine_speed.efficiency(runs_of(result, ours["name"], 1), passes)
        found.append(Goal(f"{engine}, η", ours["title"], asked["eta"], eta))
        found += _batch_goals(result, engine)
    return found


def _batch_goals(result: Result, engine: str) -> list[Goal]:
    """At each batch size the fastest of ours, against what α, c and v allow the best fixed lookahead."""
    found = []
    for batch in sorted({run["batch"] for run in result["runs"]} - {1}):
        ours = fastest(result, batch, kind=DRAFTING, engine=engine)
        fixed = [m for m in result["methods"] if (m["kind"], m["engine"]) == ("fixed", engine)]
        limits = [limit for m in fixed if (limit := engine_speed.allowed(result, m, batch)) is not None]
        if ours is not None:
            value = engine_speed.over_plain_on_engine(result, ours, batch)
            share = value.middle / max(limits) if limits and value is not None else None
            found.append(Goal(f"{engine}, batch size {batch}, share of what is allowed", ours["title"], 0.90, share))
    return found


def _gpu_goals(result: Result) -> list[Goal]:
    ours = fastest(result, 1, kind=DRAFTING)
    plain = fastest(result, 1, kind=("none", "plain"), engine=_FAST_ENGINES)
    plain_ours = fastest(result, 1, kind="none")
    if ours is None:
        return []
    speed = None if plain_ours is None else engine_speed.typical_rate(runs_of(result, plain_ours["name"], 1))
    share = None if speed is None else bandwidth.share(speed, result["memory"])
    return [
        _over(result, ours, fastest(result, 1, kind="assisted"), "over transformers' best", 6.0),
        _over(result, ours, plain, "over plain, static cache, captured or compiled", 2.2),
        Goal(
            "plain decoding, share of the memory's bandwidth", plain_ours["title"] if plain_ours else "–", 0.80, share
        ),
    ]


def _floor(result: Result) -> Goal:
    """The worst prompt of all that "auto" decoded, on any engine and at any batch size."""
    rows = [m for m in result["methods"] if m["kind"] in ("auto", "floor")]
    worst = [(place, m) for m in rows if (place := engine_speed.worst_prompt(result, m["name"])) is not None]
    what = f"auto, worst prompt and batch size, over plain, {result['arguments']['max_new_tokens']} tokens"
    if result["arguments"]["max_new_tokens"] < _LONG_ENOUGH:
        what += f" (asked for at {_LONG_ENOUGH} or more)"
    if not worst:
        return Goal(what, "–", 0.97, None)
    (batch, group, value), method = min(worst, key=lambda item: item[0][2].middle)
    title = f"{method['title']}, batch size {batch}, prompt {group + 1}"
    return Goal(what, title, 0.97, value.middle, value.low, value.high)


def _over(result: Result, ours: MethodDict, theirs: MethodDict | None, measure: str, least: float) -> Goal:
    value: Ratio | None = None
    if theirs is not None:
        value = ratio(_runs(result, ours), _runs(result, theirs))
    if value is None:
        return Goal(measure, ours["title"], least, None)
    return Goal(measure, ours["title"], least, value.middle, value.low, value.high)


def _runs(result: Result, method: MethodDict) -> Sequence[Mapping[str, Any]]:
    return runs_of(result, method["name"], 1)
