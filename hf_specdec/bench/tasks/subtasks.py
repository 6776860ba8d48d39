"""The task `subtasks`: every way of decoding on the same examples of every subtask."""

from __future__ import annotations

import sys

from hf_specdec.bench.figures.scores import scores
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.reports.tables import subtasks as subtasks_tables
from hf_specdec.bench.running.methods import (
    LOOKUP_TOKENS,
    Method,
    assisted_refusal,
    lookahead,
    plain,
    prompt_lookup,
    strategy_named,
    transformers_assisted,
)
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import run_session
from hf_specdec.bench.tasks import collecting
from hf_specdec.bench.tasks.collecting import Contender


def run_subtasks(settings: Settings, shared: Processes) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the lines of each subtask.

    Raises `BenchError` for what the user can put right.
    """
    dialogues = questions.dialogues(settings)
    pair = load_pair(settings)
    contenders = [Contender(method, pair) for method in contestants(settings, pair)]
    # Looking up drafts most.
    widest = max(lookahead(settings, pair), LOOKUP_TOKENS)
    result = collecting.collect(settings, contenders, dialogues, shared, widest)
    if result is None:
        return
    if refusal := assisted_refusal(settings, pair):
        result["notes"].append(refusal)
    result["quality"] = scores(result)
    run_session.finish(result, settings)
    sys.stdout.write(subtasks_tables.terminal(result))


def contestants(settings: Settings, pair: LoadedPair) -> list[Method]:
    """Plain decoding first; transformers' own assisted generation only where it can run."""
    methods = [plain(), strategy_named("speculative", settings, pair), strategy_named("bild", settings, pair)]
    if assisted_refusal(settings, pair) is None:
        methods.append(transformers_assisted(settings, pair))
    return [*methods, prompt_lookup(settings)]
