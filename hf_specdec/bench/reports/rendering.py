"""From a result to its markdown whatever its task."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hf_specdec.bench.reports.tables import ablation, benchmark, engines, growth, subtasks, sweep

_RENDERERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "benchmark": benchmark.render,
    "decode": benchmark.render,
    "subtasks": subtasks.render,
    "sweep": sweep.render,
    "ablation": ablation.render,
    "engines": engines.render,
    "growth": growth.render,
}

TASKS = tuple(_RENDERERS)


def render(result: Mapping[str, Any]) -> str:
    """The whole report of a result; every title says where the pair is synthetic."""
    text = _RENDERERS[result["task"]](result)
    if synthetic_pair(result):
        text = re.sub(r"^(#+ .*)$", r"\1 (synthetic pair, acceptance imposed)", text, flags=re.MULTILINE)
    return text


def synthetic_pair(result: Mapping[str, Any]) -> bool:
    """Whether a result's models have random weights."""
    return "synthetic" in result["models"]["target"]
