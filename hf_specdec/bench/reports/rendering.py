"""From a result of any task to its markdown."""

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
    """The whole report of a result; for a synthetic pair, every title says that acceptance is imposed."""
    text = _RENDERERS[result["task"]](result)
    if note := title_note(result):
        text = re.sub(r"^(#+ .*)$", rf"\1 ({note})", text, flags=re.MULTILINE)
    return text


def title_note(result: Result) -> str | None:
    """The note on the models that every title carries; None for pairs with trained weights."""
    return "synthetic pair, acceptance imposed" if "synthetic" in result["models"]["target"] else None
