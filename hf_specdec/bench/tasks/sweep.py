"""Finds the best draft, draft length, thresholds and other settings: all values crossed, on the same examples."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from hf_specdec.bench import results
from hf_specdec.bench.figures import quality, speed
from hf_specdec.bench.figures.frames import Part, whole
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.models.loading import LoadedPair, check_target, load_pair, load_pairs
from hf_specdec.bench.models.names import full_name, known_drafts, short_name
from hf_specdec.bench.records import Method, Result
from hf_specdec.bench.reports import columns
from hf_specdec.bench.reports.best_settings import recommendations
from hf_specdec.bench.reports.columns import Cell, Columns, method_table
from hf_specdec.bench.reports.document import Block, Picture, section
from hf_specdec.bench.reports.heading import heading, remarks, terminal
from hf_specdec.bench.reports.markdown import bullets, capital, number, points, ratio
from hf_specdec.bench.running.measuring import measured_questions
from hf_specdec.bench.running.methods import (
    STOP_ENTROPY,
    STOP_LOOKAHEAD,
    Contender,
    fixed_lookahead,
    named,
    others_settings,
    plain,
    plain_on_engine,
)
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.transformers_methods import assisted_baselines, assisted_refusal
from hf_specdec.bench.settings import KEYWORDS, BenchError, Settings
from hf_specdec.bench.tasks import JUDGED_LIMIT
from hf_specdec.bench.tasks.subtasks import MEASURES, NO_LOSS, by_subtask
from hf_specdec.config import COPYING

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, "auto")

LEGEND = (
    "c, v: a draft step, and a verification of a round's tokens, each over one target step; bare passes on the same "
    "engine. The predicted speedup takes acceptance as independent from token to token, so it is an estimate. Quality "
    "is measured against the references, 0 to 100. Won: on how many subtasks a row of BiLD is faster than the fastest "
    "speculative row (the interval lies above 1) with quality kept: no answer is worse by any measure, or a loss of "
    f"more than one point is excluded. The fastest row is chosen on the calls that it is measured on, which flatters "
    f"it a little. {NO_LOSS}"
)
LOSSY = (
    "Lossless speculation: speculative decoding with the same draft and engine, at its fastest lookahead. Facts: the "
    "share of a reference's statements that stand in the answer; compared with the mean of the lossless methods' "
    "scores, in points. Short answers are a single statement."
)


AUTOMATIC = (
    "Each over plain decoding on its engine, and over the fastest of what it could have chosen: plain decoding, and "
    "fixed lookaheads with its draft or without one, which is chosen on the calls that it is measured on."
)


def run(settings: Settings, shared: Processes) -> None:
    """Measure, write the result and its report into `settings.output_dir`, print the tables and the best settings."""
    dialogues = questions.dialogues(asked(settings))
    pairs = load_pairs(settings, drafts_of(settings)) if settings.uses_draft else [load_pair(settings)]
    result = measured_questions(settings, grid(settings, pairs), dialogues, shared)
    if result is None:
        return
    result.notes += dict.fromkeys(filter(None, (assisted_refusal(settings, pair) for pair in pairs)))
    result.quality = quality.scores(result)
    results.finish(result, render)
    part = whole(result)
    sys.stdout.write(terminal([*_tables(part), *recommendations(part), *remarks(part)]))


def asked(settings: Settings) -> Settings:
    """The settings, with more examples of the embedded data if quality is judged."""
    return replace(settings, embedded_limit=JUDGED_LIMIT) if settings.lossy_strategies else settings


def drafts_of(settings: Settings) -> tuple[str, ...]:
    """The full names of the drafts to compare: the given ones, or all that are known for the target.

    Raises `BenchError` if there are none, or if the last parts of two names are equal.
    """
    if settings.draft_models:
        short = [short_name(name) for name in settings.draft_models]
        if same := next((name for name in short if short.count(name) > 1), None):
            raise BenchError(
                f"--draft_models: several are called {same!r}, so reports could not tell them apart; rename a folder"
            )
        return tuple(full_name(name) for name in settings.draft_models)
    if settings.assistant_model:
        return (full_name(settings.assistant_model),)
    known = known_drafts(settings.model_name)
    if not known:
        check_target(settings)
        raise BenchError(
            f"--draft_models: not given, and no draft is known for the target {settings.model_name!r}; name some"
        )
    return known


def grid(settings: Settings, pairs: list[LoadedPair]) -> list[Contender]:
    """Plain generate(), plain on every engine of the grid, transformers' assisted, then ours at every setting.

    By default speculative decoding at `LOOKAHEADS`, "auto" included, with the entropy stop, and with both. A lossy
    strategy takes part, with all values of its own settings, if it is named or one of these settings is given.
    """
    lossy = settings.lossy_strategies
    listed = [one for pair in pairs for one in _speculative(settings, pair, bool(lossy))]
    for strategy, pair in product(lossy, pairs):
        for keywords in _crossed(settings, pair, strategy):
            if strategy != "ensemble" or keywords["drafter"] not in COPYING:
                listed.append(named(strategy, keywords, pair))
    contenders = list({one.name: one for one in listed}.values())  # each pair lists the methods without a draft
    engines = {one.method.same_engine: plain_on_engine(one.method.keywords, pairs[0]) for one in contenders}
    found = [plain(pairs[0]), *engines.values()]
    for pair in pairs:
        takes = pair.draft is not None and assisted_refusal(settings, pair) is None
        for one in assisted_baselines(settings, pair) if takes else ():
            title = f"{one.method.title} with {short_name(str(pair.draft_name))}"
            found.append(one.told(name=f"{one.name}/{pair.draft_name}", title=title))
    return [*found, *contenders]


def _speculative(settings: Settings, pair: LoadedPair, lossy: bool) -> Iterator[Contender]:
    for keywords in _crossed(settings, pair, "speculative", every=not lossy):
        yield named("speculative", keywords, pair)
    # A grid of thresholds is large enough, so its lookahead is fixed unless several are given.
    stops = pair.draft is not None and not lossy
    if stops and not _chosen(settings, "num_assistant_tokens") and not _chosen(settings, "entropy_threshold"):
        for lookahead in (STOP_LOOKAHEAD, "auto"):
            stopping = {"num_assistant_tokens": lookahead, "entropy_threshold": STOP_ENTROPY}
            yield named("speculative", stopping, pair)


def _crossed(settings: Settings, pair: LoadedPair, strategy: str, *, every: bool = False) -> Iterator[dict[str, Any]]:
    """Yield keywords of generate(), with all values of the grid crossed.

    Args:
        strategy: the strategy whose settings are crossed; those of others are left out.
        every: use all of `LOOKAHEADS` if no lookahead is given.
    """
    names = [name for name in KEYWORDS if name not in others_settings(strategy)]
    values = {name: settings.values(name) for name in names}
    if not _chosen(settings, "num_assistant_tokens"):
        values["num_assistant_tokens"] = LOOKAHEADS if every else (fixed_lookahead(settings, pair),)
    for combination in product(*values.values()):
        yield dict(zip(names, combination, strict=True))


def _chosen(settings: Settings, name: str) -> bool:
    return name in settings.grid or getattr(settings, name) is not None


def render(result: Result) -> list[Block]:
    """Compose the report."""
    part = whole(result)
    found: list[Block] = [heading(part), f"{columns.SPEED} {LEGEND}", *_tables(part)]
    found += section("Cold cost", columns.COLD_LEGEND, method_table({"": part}, columns.COLD))
    found += ["## Best settings", bullets(recommendations(part))]
    return [*found, *remarks(part)]


def _tables(part: Part) -> list[Block]:
    """The tables: drafts and lookaheads; BiLD's thresholds; lossy strategies overall and by subtask."""
    lossy = quality.lossy_methods(part)
    lossless = [method for method in part.methods if method not in lossy]
    shown = method_table({"": part}, _draft_columns(part.result), methods=lambda _: lossless)
    found = [*section("Drafts and lookaheads", shown), Picture("by-lookahead", "lookahead.by_lookahead", (part,))]
    bild = [method for method in part.methods if method.kind == "bild"]
    if bild:
        thresholds = method_table({"": part}, _threshold_columns(part.result), methods=lambda _: [*lossless, *bild])
        found += section("BiLD's thresholds", thresholds)
    if lossy:
        groups = {"overall": part, **by_subtask(part)}
        found += section(
            "Lossy strategies", LOSSY, method_table(groups, LOSSY_COLUMNS, group="Subtask", methods=lambda _: lossy)
        )
        found.append(Picture("speed-and-quality", "quality.speed_against_quality", (part,)))
    drafting = [method for method in speed.drafting(part) if method in lossless]
    automatic = [one for one in drafting if one.lookahead == "auto" and one.keywords.get("drafter") != "none"]
    if automatic and len(automatic) < len(drafting):
        chosen = method_table(by_subtask(part), AUTOMATIC_COLUMNS, group="Subtask", methods=lambda _: automatic)
        found += section("Automatic lookaheads", AUTOMATIC, chosen)
    return found


def best_fixed(part: Part, method: Method) -> Method | None:
    """The fastest method on the same engine without automatic lookahead: with the same draft, no draft, or plain."""
    drafts = (None, method.draft)
    fit = [one for one in part.methods if one.same_engine == method.same_engine and one.lookahead != "auto"]
    alike = [one for one in fit if one.kind == "speculative" and one.draft in drafts]
    return speed.fastest(part, [one for one in part.methods if one.name == method.same_engine] + alike)


def _best_fixed(part: Part, method: Method) -> str:
    best = best_fixed(part, method)
    return "–" if best is None else best.title


def _over_fixed(part: Part, method: Method) -> str:
    best = best_fixed(part, method)
    return ratio(None if best is None else speed.speedup(part, method.name, best.name))


def _name(part: Part, method: Method) -> str:
    """The draft's name, and settings that have no column."""
    return capital(method.title.partition(" with ")[0])


_SETTING: Columns = {"Method": _name, **columns.DRAFT, **columns.N}


def _draft_columns(result: Result) -> Columns:
    over = {title: cell for which in speed.BASELINES for title, cell in columns.over(result, which).items()}
    predicted = {
        key: columns.ROUNDS[key] for key in ("Predicted speedup over plain on the same engine", "Tokens/Round", "α")
    }
    costs = {"Mean acceptance rate": columns.ACCEPTANCE["Acceptance"], "Inference speed ratio (c)": columns.COSTS["c"]}
    return {**_SETTING, **costs, "v": columns.COSTS["v"], **over, **predicted, **columns.RATE, **columns.EQUAL}


def _threshold_columns(result: Result) -> Columns:
    """Columns of speed and quality by BiLD's thresholds, next to the lossless rows."""
    thresholds = {word.capitalize(): _threshold(f"{word}_threshold") for word in ("fallback", "rollback")}
    over = {title: cell for which in ("plain", "engine") for title, cell in columns.over(result, which).items()}
    figures = {"Mean acceptance rate": columns.ACCEPTANCE["Acceptance"], **over, **columns.TOKENS, **columns.RATE}
    scores = {MEASURES[name]: _score(name) for name in ("bleu", "rougeL", "exact_match")}
    return {**_SETTING, **thresholds, **figures, **columns.EQUAL, **scores, "Won": _won}


def _threshold(name: str) -> Cell:
    return lambda part, method: f"{method.keywords[name]:g}" if method.kind == "bild" else "–"


def _score(name: str) -> Cell:
    def cell(part: Part, method: Method) -> str:
        found = (one for one in part.result.quality if one.method == method.name and one.subtask is None)
        return number(next((getattr(one, name) for one in found), None), 1)

    return cell


def _won(part: Part, method: Method) -> str:
    """How many subtasks a row of BiLD wins: faster than the fastest speculative row, with quality kept."""
    base = speed.fastest(part, [one for one in part.methods if one.kind == "speculative"])
    count = quality.won(part, method.name, base.name) if method.kind == "bild" and base is not None else None
    return "–" if count is None else f"{count} of {len(part.labels)}"


def _over_lossless(part: Part, method: Method) -> str:
    base = quality.lossless_reference(part, method)
    return ratio(None if base is None else speed.speedup(part, method.name, base.name))


LOSSY_COLUMNS: Mapping[str, Any] = {
    **_SETTING,
    **columns.ACCEPTANCE,
    **columns.TOKENS,
    "Speed over lossless speculation": _over_lossless,
    "Facts, difference to lossless": lambda part, method: points(quality.change(part, method.name)),
}
AUTOMATIC_COLUMNS: Columns = {
    "Method": columns.title,
    **columns.N,
    "Speedup over plain on the same engine": lambda part, method: ratio(speed.over(part, method, "engine")),
    "Fastest fixed setting": _best_fixed,
    "Speedup over it": _over_fixed,
}
