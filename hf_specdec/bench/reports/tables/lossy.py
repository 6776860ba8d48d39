"""Lossy strategies in a sweep's report: speed and loss, over all and by subtask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_specdec.bench.figures import rounds, speed, tradeoff
from hf_specdec.bench.figures.bootstrap import Ratio
from hf_specdec.bench.figures.quality import Difference
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.figures.tradeoff import labels
from hf_specdec.bench.models.known_pairs import short_name
from hf_specdec.bench.reports.markdown import capital, difference, number, ratio, table
from hf_specdec.bench.reports.tables.subtasks import MEASURE_TITLES

LOSSY = (
    "Lossless speculation: speculative decoding with the same draft and engine, at its fastest lookahead. Facts: the "
    "share of a reference's statements that stand in the answer; compared with the mean of the lossless methods' "
    "scores, in points. Short answers are a single statement."
)
BY_SUBTASK = (
    "By subtask, each setting at its fastest lookahead. Which lookahead is fastest is told from the same calls, which "
    "flatters all rows a little."
)
# Of a method on a subtask: speed over lossless speculation, and the difference in points.
Point = tuple["Ratio | None", "Difference | None"]


def parts(result: Result) -> list[str]:
    """The sections of the report; none without lossy methods."""
    lossy = tradeoff.lossy_methods(result)
    if not lossy:
        return []
    found = [f"## Lossy strategies\n\n{LOSSY}\n\n{lossy_table(result)}"]
    panels = [None, *labels(result)]
    best = tradeoff.at_fastest_lookahead(result, lossy)
    points = {(m["name"], label): _point(result, m, label) for m in best for label in panels}
    drafts = list(dict.fromkeys(method["draft"] for method in best))
    if len(labels(result)) > 1:
        found.append(BY_SUBTASK)
        for draft in drafts:
            mine = [method for method in best if method["draft"] == draft]
            found.append(f"### {_draft(draft)}: speed over lossless speculation")
            found.append(_by_subtask(mine, panels, lambda m, label: ratio(points[m["name"], label][0])))
            found.append(f"### {_draft(draft)}: facts, difference to lossless (points)")
            found.append(_by_subtask(mine, panels, lambda m, label: difference(points[m["name"], label][1])))
    return found


def lossy_table(result: Result) -> str:
    """One row per lossy method: speed over lossless speculation, and the score minus that of the lossless methods."""
    header = ["Strategy", "Draft", "n_lookahead", "Mean acceptance rate", "Tokens/Round"]
    header += ["Speed over lossless speculation", f"{MEASURE_TITLES[tradeoff.SCORE]}, difference to lossless"]
    rows = []
    for method in tradeoff.lossy_methods(result):
        calls = speed.calls_of(result, method["name"])
        gain, change = _point(result, method, None)
        cells = [_setting(method), _draft(method["draft"]), str(method["lookahead"])]
        cells += [number(rounds.acceptance_rate(calls), 3), number(rounds.tokens_per_round(calls), 2)]
        rows.append([*cells, ratio(gain), difference(change)])
    return table(header, rows)


def _by_subtask(
    methods: Sequence[MethodDict], panels: Sequence[str | None], cell: Callable[[MethodDict, str | None], str]
) -> str:
    header = ["Strategy", "n_lookahead", *(label or "all" for label in panels)]
    rows = [[_setting(m), str(m["lookahead"]), *(cell(m, label) for label in panels)] for m in methods]
    return table(header, rows)


def _point(result: Result, method: MethodDict, label: str | None) -> Point:
    prompts = tradeoff.prompts_of(result, label)
    return tradeoff.gain(result, method, prompts), tradeoff.change(result, method["name"], prompts)


def _setting(method: MethodDict) -> str:
    """The strategy and its settings."""
    return capital(method["title"].partition(" with ")[0])


def _draft(name: str | None) -> str:
    return short_name(name or "none")
