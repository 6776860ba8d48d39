"""The task `ablation`: speculative decoding, KV cache and Better Transformer, each on and off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

from hf_specdec.bench.inputs import questions
from hf_specdec.bench.models.loading import LoadedPair, better_transformer, load_pair
from hf_specdec.bench.reports.tables import ablation as ablation_tables
from hf_specdec.bench.running.methods import Method, plain, strategy
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import run_session
from hf_specdec.bench.tasks import collecting
from hf_specdec.bench.tasks.collecting import Contender
from hf_specdec.models.better_transformer import to_better_transformer, to_eager_attention


def run_ablation(settings: Settings, shared: Processes) -> None:
    """Measures all eight rows, writes JSON and markdown into `settings.output_dir`, prints the table.

    Raises `BenchError` for what the user can put right, a model without Better Transformer included.
    """
    dialogues = questions.dialogues(settings)
    pair = load_pair(settings)
    # Refuses before anything is measured; the rows switch it on and off themselves.
    better_transformer(pair)
    contenders = [Contender(_row(settings, pair, *switches), pair) for switches in product((False, True), repeat=3)]
    result = collecting.collect(settings, contenders, dialogues, shared, lookahead=None)
    if result is None:
        return
    for model in result["models"].values():
        model["attention"] = "eager or Better Transformer"
    run_session.finish(result, settings)
    sys.stdout.write(ablation_tables.terminal(result))


def _row(settings: Settings, pair: LoadedPair, better: bool, cache: bool, speculative: bool) -> Method:
    method = strategy(settings, pair) if speculative else plain()
    inner = method.surroundings

    @contextmanager
    def surroundings(loaded: LoadedPair) -> Iterator[Any]:
        for model in loaded.models:
            # Without this, rows of both kinds would use SDPA: it is transformers' default.
            (to_better_transformer if better else to_eager_attention)(model)
        with inner(loaded) as log:
            yield log

    facts = {"speculative": speculative, "cache": cache, "better_transformer": better}
    name = "+".join([method.name, "cache" if cache else "no cache", "better" if better else "eager"])
    title = f"{method.title}, {'with' if cache else 'without'} KV cache, {'Better Transformer' if better else 'eager'}"
    options = {**method.options, "use_cache": cache}
    return replace(method, name=name, title=title, options=options, facts=facts, surroundings=surroundings)
