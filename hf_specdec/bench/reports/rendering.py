"""From a result of any task to its markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports.tables import ablation, align, benchmark, engines, subtasks, sweep, tune

_RENDERERS: Mapping[str, Callable[[Result], str]] = {
    "benchmark": benchmark.render,
    "decode": benchmark.render,
    "subtasks": subtasks.render,
    "sweep": sweep.render,
    "ablation": ablation.render,
    "engines": engines.render,
    "tune": tune.render,
    "align": align.render,
}

_PACKAGES = ("scipy", "tabulate")


def render(result: Result) -> str:
    """The whole report of a result; for a synthetic pair, every title says that acceptance is imposed.

    Without scipy and tabulate only a line on how to render it later.
    """
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        return (
            f"No tables: {' and '.join(missing)} not installed. `pip install 'hf_specdec[bench]'`, then "
            "`scripts/assisted_generation.py --task report --output_dir DIR` renders the JSON in DIR.\n"
        )
    text = _RENDERERS[result["task"]](result)
    if note := title_note(result):
        text = re.sub(r"^(#+ .*)$", rf"\1 ({note})", text, flags=re.MULTILINE)
    return text


def title_note(result: Result) -> str | None:
    """The note on the models that every title carries; None for pairs with trained weights."""
    return "synthetic pair, acceptance imposed" if "synthetic" in result["models"]["target"] else None
