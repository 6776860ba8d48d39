"""The task `sweep`: a grid of drafts, lookaheads, thresholds and other settings on the same examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from hf_specdec.bench.figures.quality import scores
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.models.known_pairs import full_name, known_drafts, short_name
from hf_specdec.bench.models.loading import LoadedPair, check_target, load_pairs
from hf_specdec.bench.reports.tables import sweep as sweep_tables
from hf_specdec.bench.running.methods import (
    KEYWORDS,
    Method,
    fixed_lookahead,
    others_settings,
    ours,
    plain,
    plain_on_engine,
)
from hf_specdec.bench.running.methods_by_task import STOP_ENTROPY, STOP_LOOKAHEAD
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.transformers_methods import assisted_baselines, assisted_refusal
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results, run_session
from hf_specdec.bench.tasks import collecting
from hf_specdec.bench.tasks.collecting import Contender

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, "auto")


def run_sweep(settings: Settings, shared: Processes) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the tables and the best settings.

    Raises `BenchError` for what the user can put right.
    """
    results.check_output(settings)
    dialogues = questions.dialogues(settings)
    pairs = load_pairs(settings, drafts_of(settings))
    result = collecting.collect(settings, grid(settings, pairs), dialogues, shared)
    if result is None:
        return
    result["notes"] += dict.fromkeys(filter(None, (assisted_refusal(settings, pair) for pair in pairs)))
    result["quality"] = scores(result)
    run_session.finish_briefly(result, settings, sweep_tables.terminal)


def drafts_of(settings: Settings) -> tuple[str, ...]:
    """The drafts to compare, by full name: those named, or all that are known for the target.

    Raises `BenchError` without any, or if two have the same last part of their names.
    """
    if settings.draft_models:
        short = [short_name(name) for name in settings.draft_models]
        if same := next((name for name in short if short.count(name) > 1), None):
            raise BenchError(
                f"--draft_models: several are called {same!r}, which is how reports name them; rename a folder"
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
    strategy takes part, with all values of its own settings, if it is named or if any of these settings is given.
    """
    lossy = settings.lossy_strategies
    contenders = [(method, pair) for pair in pairs for method in _speculative(settings, pair, bool(lossy))]
    for strategy, pair in product(lossy, pairs):
        for keywords in _crossed(settings, pair, strategy):
            if strategy != "ensemble" or keywords["drafter"] not in ("lookup", "hybrid"):
                contenders.append((_named(strategy, keywords, pair), pair))
    engines = {method.same_engine: plain_on_engine(method.keywords) for method, _ in contenders}
    first = [plain(), *engines.values()]
    found = [Contender(method, pairs[0]) for method in first]
    for pair in pairs:
        for method in assisted_baselines(settings, pair) if assisted_refusal(settings, pair) is None else ():
            name, title = f"{method.name}/{pair.draft_name}", f"{method.title} with {short_name(str(pair.draft_name))}"
            found.append(Contender(replace(method, name=name, title=title), pair))
    return [*found, *(Contender(method, pair) for method, pair in contenders)]


def _speculative(settings: Settings, pair: LoadedPair, lossy: bool) -> Iterator[Method]:
    for keywords in _crossed(settings, pair, "speculative", every=not lossy):
        yield _named("speculative", keywords, pair)
    # A grid of thresholds is wide enough: its lookahead is the usual one unless several are asked for.
    if not lossy and not _chosen(settings, "num_assistant_tokens") and not _chosen(settings, "entropy_threshold"):
        for lookahead in (STOP_LOOKAHEAD, "auto"):
            stopping = {"num_assistant_tokens": lookahead, "entropy_threshold": STOP_ENTROPY}
            yield _named("speculative", stopping, pair)


def _crossed(settings: Settings, pair: LoadedPair, strategy: str, *, every: bool = False) -> Iterator[dict[str, Any]]:
    """Keywords of generate(), all values of the grid crossed.

    Args:
        strategy: whose settings to cross; those of others are left out.
        every: all of `LOOKAHEADS`, where no lookahead is given.
    """
    names = [name for name in KEYWORDS if name not in others_settings(strategy)]
    values = {name: settings.values(name) for name in names}
    if not _chosen(settings, "num_assistant_tokens"):
        values["num_assistant_tokens"] = LOOKAHEADS if every else (fixed_lookahead(settings, pair),)
    for combination in product(*values.values()):
        yield dict(zip(names, combination, strict=True))


def _chosen(settings: Settings, name: str) -> bool:
    return name in settings.grid or getattr(settings, name) is not None


def _named(strategy: str, keywords: dict[str, Any], pair: LoadedPair) -> Method:
    """The strategy under a name of its own, with the settings as data."""
    method = ours(strategy, keywords, pair)
    told = [f"{key}={value}" for key, value in method.keywords.items() if key != "generation_strategy"]
    name = "/".join([strategy, str(pair.draft_name), *told])
    title = f"{method.title} with {short_name(str(pair.draft_name))}, lookahead {method.lookahead}"
    return replace(method, name=name, title=title)
