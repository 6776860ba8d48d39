"""Which pictures a result has."""

from __future__ import annotations

from matplotlib.figure import Figure

from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.figures.speed import batch_sizes
from hf_specdec.bench.figures.tradeoff import lossy_methods
from hf_specdec.bench.models.known_pairs import short_name
from hf_specdec.bench.reports.best_settings import methods_of
from hf_specdec.bench.reports.pictures import (
    ablation,
    align,
    engines,
    gains,
    rounds,
    subtasks,
    sweep,
    tradeoff,
    tune,
)
from hf_specdec.bench.reports.rendering import title_note
from hf_specdec.bench.reports.tables.subtasks import drafting_methods
from hf_specdec.bench.reports.tables.sweep import thresholds
from hf_specdec.bench.reports.tables.tune import tried

_ENOUGH = 3  # points that make a line, or a map, worth a picture


def pictures(result: Result) -> dict[str, Figure]:
    """The pictures of a result, by name; those without data are left out."""
    found = _DRAWN.get(result["task"], lambda _: {})(result)
    if note := title_note(result):
        for figure in found.values():
            figure.suptitle(f"{figure.get_suptitle()}\n({note})")
    return found


def _benchmark(result: Result) -> dict[str, Figure]:
    if len(result["methods"]) < _ENOUGH:
        return {}
    found = {"gain-by-method": gains.gain_by_method(result), "waterfall": gains.waterfall(result)}
    return found | _of_rounds(result)


def _subtasks(result: Result) -> dict[str, Figure]:
    found = {
        f"speedup-by-subtask-over-{which}": subtasks.speedup_by_subtask(result, which)
        for which in ("engine", "plain")
        if drafting_methods(result, which)
    }
    if result["quality"] and tradeoff.quality_differs(result):
        found["speed-and-quality"] = tradeoff.speed_against_quality(result)
    return found | _of_rounds(result)


def _sweep(result: Result) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    lookaheads = {m["lookahead"] for m in methods_of(result, "speculative") if isinstance(m["lookahead"], int)}
    if len(lookaheads) >= _ENOUGH:
        found["speedup-by-lookahead"] = sweep.speedup_over_lookahead(result)
    bild = methods_of(result, "bild")
    for draft, lookahead in dict.fromkeys((m["draft"], m["lookahead"]) for m in bild):
        pairs = {thresholds(m) for m in bild if (m["draft"], m["lookahead"]) == (draft, lookahead)}
        if len(pairs) >= _ENOUGH and all(len(set(values)) > 1 for values in zip(*pairs, strict=True)):
            found[f"thresholds-{short_name(draft)}-{lookahead}"] = sweep.threshold_maps(result, draft, lookahead)
    lossy = lossy_methods(result) if result["quality"] else []
    if lossy and tradeoff.quality_differs(result):
        found["speed-and-quality"] = tradeoff.speed_against_quality(result)
    for draft in dict.fromkeys(m["draft"] for m in lossy if m["draft"] and m["kind"] != "bild"):
        found[f"lossy-{short_name(draft)}"] = tradeoff.lossy_curves(result, draft)
    return found


def _ablation(result: Result) -> dict[str, Figure]:
    return {"gains": ablation.ablation_gains(result)}


def _engines(result: Result) -> dict[str, Figure]:
    sizes = batch_sizes(result)
    found = {
        "gain-by-method": gains.gain_by_method(result, sizes[0]),
        "waterfall": gains.waterfall(result, sizes[0]),
        "tokens-until-it-pays": engines.time_until_it_pays(result, sizes[0]),
    }
    if len(sizes) >= _ENOUGH:
        found["gain-by-batch"] = engines.gain_by_batch(result)
    return found


def _tune(result: Result) -> dict[str, Figure]:
    drawn = [tuned for tuned in result["tuned"] if tried(tuned)]
    return {f"candidates-batch-{tuned['batch']}": tune.fastest_candidates(result, tuned) for tuned in drawn}


def _align(result: Result) -> dict[str, Figure]:
    return {"loss": align.loss_over_steps(result)} | _of_rounds(result)


def _of_rounds(result: Result) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    if len(rounds.timed_methods(result)) > 0:
        found["time-per-round"] = rounds.time_per_round(result)
    if rounds.drafting(result):
        found["acceptance-by-position"] = rounds.acceptance_by_position(result)
    return found


_DRAWN = {
    "benchmark": _benchmark,
    "subtasks": _subtasks,
    "sweep": _sweep,
    "ablation": _ablation,
    "engines": _engines,
    "tune": _tune,
    "align": _align,
}
