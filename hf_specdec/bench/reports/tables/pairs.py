"""One table over the results of several pairs: speedups by pair, strategy and subtask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_specdec.bench.figures import speed, tradeoff
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.models.known_pairs import short_name
from hf_specdec.bench.reports.markdown import capital, ratio, table
from hf_specdec.bench.reports.rendering import title_note
from hf_specdec.bench.reports.tables import methods
from hf_specdec.bench.reports.tables.subtasks import drafting_methods

LEGEND = (
    "Each column of a subtask shows the micro speedup on its examples; bold where its 95% interval lies above 1. The "
    "last two columns are over all examples, with their intervals. Rows of different machines or versions should not "
    "be compared with each other; each row is a ratio within one run."
)


def render(results: Sequence[Result]) -> str:
    """Speedups over each baseline of every pair that was measured by subtask."""
    parts = ["# Pairs", f"{methods.SPEED} {methods.MACRO} {LEGEND}"]
    for which, title in speed.BASELINES.items():
        if any(drafting_methods(result, which) for result in results):
            parts.append(f"## Over {title}\n\n{pair_table(results, which)}")
    return "\n\n".join(parts) + "\n"


def pair_table(results: Sequence[Result], which: str) -> str:
    """One row per pair, data set, method, and greedy decoding or sampling."""
    labels = list(dict.fromkeys(label for result in results for label in tradeoff.labels(result)))
    rows = []
    for result in results:
        for method in drafting_methods(result, which):
            cells = [_cell(result, method, which, label) for label in labels]
            whole = [ratio(methods.over(result, method, which, by=by)) for by in ("micro", "macro")]
            rows.append([*about(result), capital(method["title"]), *cells, *whole])
    header = ["Target", "Draft", "Data", "Tokens chosen by", "Method", *labels, "All, micro", "All, macro"]
    return table(header, rows)


def about(result: Result) -> list[str]:
    """Target, draft, data set, and whether tokens were drawn."""
    note = title_note(result)
    target = short_name(result["models"]["target"]["name"]) + (f" ({note})" if note else "")
    draft = short_name(result["models"].get("draft", {}).get("name", "–"))
    return [target, draft, result["arguments"]["dataset"], "sampling" if result["sampling"] else "greedy"]


def _cell(result: Result, method: Mapping[str, Any], which: str, label: str) -> str:
    prompts = tradeoff.prompts_of(result, label)
    gain = methods.over(result, method, which, prompts=prompts) if prompts else None
    if gain is None:
        return "–"
    return f"**{gain.value:.2f}**" if gain.faster else f"{gain.value:.2f}"
