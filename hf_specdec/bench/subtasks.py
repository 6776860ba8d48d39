"""The task `subtasks`: every way of decoding on the same examples of every subtask."""

from __future__ import annotations

import sys

from hf_specdec.bench import collect, datasets, sitting, subtasks_report
from hf_specdec.bench.collect import Contender
from hf_specdec.bench.loading import LoadedPair, load_pair
from hf_specdec.bench.methods import (
    LOOKUP_TOKENS,
    Method,
    assisted_refusal,
    lookahead,
    plain,
    prompt_lookup,
    strategy_named,
    transformers_assisted,
)
from hf_specdec.bench.processes import Processes
from hf_specdec.bench.scores import scores
from hf_specdec.bench.settings import Settings


def run_subtasks(settings: Settings, shared: Processes) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the lines of each subtask.

    Raises `BenchError` for what the user can put right.
    """
    dialogues = datasets.dialogues(settings)
    pair = load_pair(settings)
    contenders = [Contender(method, pair) for method in contestants(settings, pair)]
    # Looking up drafts most.
    widest = max(lookahead(settings, pair), LOOKUP_TOKENS)
    result = collect.collect(settings, contenders, dialogues, shared, widest)
    if result is None:
        return
    if refusal := assisted_refusal(settings, pair):
        result["notes"].append(refusal)
    result["quality"] = scores(result)
    sitting.finish(result, settings)
    sys.stdout.write(subtasks_report.terminal(result))


def contestants(settings: Settings, pair: LoadedPair) -> list[Method]:
    """Plain decoding first; transformers' own assisted generation only where it can run."""
    methods = [plain(), strategy_named("speculative", settings, pair), strategy_named("bild", settings, pair)]
    if assisted_refusal(settings, pair) is None:
        methods.append(transformers_assisted(settings, pair))
    return [*methods, prompt_lookup(settings)]
