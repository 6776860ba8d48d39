"""From a result to its markdown, whatever its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_specdec.bench import ablation_report, report, subtasks_report, sweep_report

_RENDERERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "benchmark": report.render,
    "decode": report.render,
    "subtasks": subtasks_report.render,
    "sweep": sweep_report.render,
    "ablation": ablation_report.render,
}

TASKS = tuple(_RENDERERS)


def render(result: Mapping[str, Any]) -> str:
    """The whole report of a result."""
    return _RENDERERS[result["task"]](result)
