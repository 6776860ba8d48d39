"""From a result to its markdown whatever its task."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports.tables import ablation, align, benchmark, engines, growth, rollback, subtasks, sweep, tune

_RENDERERS: Mapping[str, Callable[[Result], str]] = {
    "benchmark": benchmark.render,
    "decode": benchmark.render,
    "subtasks": subtasks.render,
    "sweep": sweep.render,
    "ablation": ablation.render,
    "engines": engines.render,
    "growth": growth.render,
    "rollback": rollback.render,
    "tune": tune.render,
    "align": align.render,
}


def render(result: Result) -> str:
    """The whole report of a result; every title says where weights are random or acceptance is imposed."""
    text = _RENDERERS[result["task"]](result)
    if note := title_note(result):
        text = re.sub(r"^(#+ .*)$", rf"\1 ({note})", text, flags=re.MULTILINE)
    return text


def title_note(result: Result) -> str | None:
    """What every title has to say about the models; None for pairs with trained weights."""
    return "synthetic pair, acceptance imposed" if "synthetic" in result["models"]["target"] else None
