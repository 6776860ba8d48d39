"""Tables of the task growth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports.heading import heading
from hf_specdec.bench.reports.markdown import capital, table

# By this share of the calls every prompt length has come up and allocators hold what they keep.
_SETTLED = 0.25
MIB = 2**20

LEGEND = (
    "One process calls generate() again and again, on prompts of all lengths in turn. Growth is counted from the first "
    f"sample after {_SETTLED:.0%} of the calls to the last. Resident: memory of the process."
)


def render(result: Result) -> str:
    """The whole report."""
    parts = [heading(result), LEGEND, growth_table(result)]
    for method in result["methods"]:
        parts.append(f"## {capital(method['title'])}\n\n{sample_table(result, method['name'])}")
    parts += [f"- {note}" for note in result["notes"]]
    return "\n\n".join(parts) + "\n"


def growth_table(result: Result) -> str:
    """One row per method: what grew after the first calls."""
    rows = []
    for method in result["methods"]:
        first, last = settled_and_last(result, method["name"])
        resident = last["resident_bytes"] - first["resident_bytes"]
        rows.append(
            [
                capital(method["title"]),
                f"{first['calls']} to {last['calls']}",
                f"{resident / MIB:+.1f}",
                f"{100 * resident / first['resident_bytes']:+.2f}%",
                f"{(last['device_bytes'] - first['device_bytes']) / MIB:+.1f}",
                f"{last['graphs'] - first['graphs']:+d}",
            ]
        )
    return table(["Method", "Calls", "Resident (MiB)", "Resident (%)", "GPU (MiB)", "Compiled graphs"], rows)


def sample_table(result: Result, method: str) -> str:
    """All samples of a method."""
    rows = [
        [
            str(item["calls"]),
            f"{item['resident_bytes'] / MIB:.1f}",
            f"{item['device_bytes'] / MIB:.1f}",
            str(item["graphs"]),
        ]
        for item in samples_of(result, method)
    ]
    return table(["Calls", "Resident (MiB)", "GPU (MiB)", "Compiled graphs"], rows)


def samples_of(result: Result, method: str) -> list[Mapping[str, Any]]:
    """A method's samples in the order of the calls."""
    return [item for item in result["samples"] if item["method"] == method]


def settled_and_last(result: Result, method: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The samples between which growth is counted."""
    mine = samples_of(result, method)
    settled = next(item for item in mine if item["calls"] >= _SETTLED * mine[-1]["calls"])
    return settled, mine[-1]
