"""One picture over the results of several pairs: greedy decoding beside sampling."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from hf_specdec.bench.figures import speed, tradeoff
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports.pictures.drawing import (
    BY_KIND,
    KIND_NAMES,
    caption,
    draw_ratio,
    legend,
    new_figure,
    of_intervals,
    offset,
)
from hf_specdec.bench.reports.pictures.gains import HOLLOW
from hf_specdec.bench.reports.tables import methods
from hf_specdec.bench.reports.tables.pairs import about
from hf_specdec.bench.reports.tables.subtasks import drafting_methods

Row = tuple[str, ...]


def greedy_and_sampling(results: Sequence[Result], which: str = "plain") -> Figure:
    """The speedup of each method over a baseline; rows are subtasks of a single pair, or pairs over all examples."""
    rows = _rows(results)
    kinds = list(dict.fromkeys(m["kind"] for result in results for m in drafting_methods(result, which)))
    modes = sorted({bool(result["sampling"]) for result in results})
    figure, panels = new_figure(1.6 + 0.13 * len(rows) * max(2, len(kinds)), columns=len(modes), sharey=True)
    for axes, sampling in zip(panels, modes, strict=True):
        named: set[str] = set()
        for place, (_, where) in enumerate(rows):
            if place % 2:
                axes.axhspan(place - 0.5, place + 0.5, color="0.96", zorder=0)
            for result, prompts in where:
                if bool(result["sampling"]) != sampling:
                    continue
                for method in drafting_methods(result, which):
                    gain = methods.over(result, method, which, prompts=prompts)
                    if gain is not None:
                        kind = method["kind"]
                        label = None if kind in named else KIND_NAMES[kind]
                        named.add(kind)
                        at = offset(place, kinds.index(kind), len(kinds))
                        draw_ratio(axes, at, gain, BY_KIND[kind], label=label)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xlabel(f"Speedup over {speed.BASELINES[which]} (×)\n{'sampling' if sampling else 'greedy'}")
        axes.set_ylim(len(rows) - 0.5, -0.5)
    panels[0].set_yticks(range(len(rows)), [name for name, _ in rows])
    figure.suptitle("Decoding speed" + (", greedy and sampling" if len(modes) > 1 else ""))
    legend(panels[0])
    caption(figure, next((words for result in results if (words := of_intervals(result, HOLLOW))), None))
    return figure


def _rows(results: Sequence[Result]) -> list[tuple[str, list[tuple[Result, list[int]]]]]:
    """(name, [(result, prompts)]) of each pair; if there is only one, of each of its subtasks and of all."""
    pairs: dict[str, list[Result]] = {}
    for result in results:
        target, draft, data, _ = about(result)
        pairs.setdefault(f"{target} + {draft}\n{data}", []).append(result)
    if len(pairs) > 1:
        return [(name, [(r, tradeoff.prompts_of(r, None)) for r in listed]) for name, listed in pairs.items()]
    labels = list(dict.fromkeys(label for result in results for label in tradeoff.labels(result)))
    return [
        (label or "all", [(r, tradeoff.prompts_of(r, label)) for r in results if tradeoff.prompts_of(r, label)])
        for label in (*labels, None)
    ]
