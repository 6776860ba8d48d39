"""The task `sweep`: a grid of drafts, lookaheads and BiLD's thresholds on the same examples."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

from hf_specdec import embedded
from hf_specdec.bench.figures.scores import scores
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.models.known_pairs import default_draft, full_name, known_drafts
from hf_specdec.bench.models.loading import LoadedPair, load_pairs
from hf_specdec.bench.reports.tables import sweep as sweep_tables
from hf_specdec.bench.running.methods import Method, lookahead, plain, strategy
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import run_session
from hf_specdec.bench.tasks import collecting
from hf_specdec.bench.tasks.collecting import Contender

_LOOKAHEADS = (1, 3, 5, 7)


def run_sweep(settings: Settings, shared: Processes) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the tables and the best settings.

    Raises `BenchError` for what the user can put right.
    """
    dialogues = questions.dialogues(settings)
    pairs = load_pairs(settings, drafts_of(settings))
    contenders = grid(settings, pairs)
    longest = max(contender.method.facts.get("lookahead", 1) for contender in contenders)
    result = collecting.collect(settings, contenders, dialogues, shared, longest)
    if result is None:
        return
    result["quality"] = scores(result)
    run_session.finish(result, settings)
    sys.stdout.write(sweep_tables.terminal(result))


def drafts_of(settings: Settings) -> tuple[str, ...]:
    """The drafts to compare, by full name: those named, all that ship with an embedded target, or the known one."""
    if settings.draft_models:
        return tuple(full_name(name) for name in settings.draft_models)
    if settings.assistant_model:
        return (full_name(settings.assistant_model),)
    if full_name(settings.model_name) in embedded.names():
        return known_drafts(settings.model_name)
    draft = default_draft(settings.model_name)
    if draft is None:
        raise BenchError(
            f"--draft_models: not given, and no draft is known for the target {settings.model_name!r}; name some"
        )
    return (draft,)


def grid(settings: Settings, pairs: list[LoadedPair]) -> list[Contender]:
    """Plain decoding, then speculative decoding with every draft and lookahead.

    BiLD is added, over all pairs of thresholds, where it was asked for, be it by name or by thresholds.
    """
    contenders = [Contender(plain(), pairs[0])]
    thresholds = settings.fallback_thresholds, settings.rollback_thresholds
    bild = settings.generation_strategy == "bild" or any(thresholds)
    # A grid of thresholds is wide enough: its lookahead is the usual one unless several are asked for.
    lookaheads = settings.lookaheads or ((lookahead(settings, pairs[0]),) if bild else _LOOKAHEADS)
    for pair, tokens in product(pairs, lookaheads):
        chosen = replace(settings, generation_strategy="speculative", num_assistant_tokens=tokens)
        contenders.append(Contender(_named(chosen, pair), pair))
    if bild:
        fallbacks = thresholds[0] or (settings.fallback_threshold,)
        rollbacks = thresholds[1] or (settings.rollback_threshold,)
        for pair, tokens, fallback, rollback in product(pairs, lookaheads, fallbacks, rollbacks):
            chosen = replace(settings, generation_strategy="bild", num_assistant_tokens=tokens)
            chosen = replace(chosen, fallback_threshold=fallback, rollback_threshold=rollback)
            contenders.append(Contender(_named(chosen, pair), pair))
    return contenders


def _named(chosen: Settings, pair: LoadedPair) -> Method:
    """The strategy under a name of its own, with the settings as data."""
    assert pair.draft is not None
    method = strategy(chosen, pair)
    facts = {
        "strategy": chosen.generation_strategy,
        "draft": pair.draft_name,
        "draft_parameters": pair.draft.num_parameters(),
        "lookahead": chosen.num_assistant_tokens,
    }
    if chosen.generation_strategy == "bild":
        facts |= {"fallback": chosen.fallback_threshold, "rollback": chosen.rollback_threshold}
    name = "/".join(str(value) for key, value in facts.items() if key != "draft_parameters")
    title = f"{method.title} with {pair.draft_name}, lookahead {chosen.num_assistant_tokens}"
    return replace(method, name=name, title=title, facts=facts)
