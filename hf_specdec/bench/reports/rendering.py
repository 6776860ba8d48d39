"""From a result to its markdown, whatever its task."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hf_specdec.bench.reports import (
    ablation_report,
    benchmark_report,
    engines_report,
    growth_report,
    subtasks_report,
    sweep_report,
)

_RENDERERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "benchmark": benchmark_report.render,
    "decode": benchmark_report.render,
    "subtasks": subtasks_report.render,
    "sweep": sweep_report.render,
    "ablation": ablation_report.render,
    "engines": engines_report.render,
    "growth": growth_report.render,
}

TASKS = tuple(_RENDERERS)


def render(result: Mapping[str, Any]) -> str:
    """The whole report of a result; every title says where the pair is synthetic."""
    text = _RENDERERS[result["task"]](result)
    if synthetic_pair(result):
        text = re.sub(r"^(#+ .*)$", r"\1 (synthetic pair)", text, flags=re.MULTILINE)
    return text


def synthetic_pair(result: Mapping[str, Any]) -> bool:
    """Whether a result's models have random weights."""
    return "synthetic" in result["models"]["target"]
