"""The task `ablation`: speculative decoding, KV cache and Better Transformer, each on and off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

from hf_specdec.bench.inputs import questions
from hf_specdec.bench.models.loading import LoadedPair, better_transformer, load_pair
from hf_specdec.bench.reports.tables import ablation as ablation_tables
from hf_specdec.bench.running.methods import Method, chosen_keywords, ours, plain, plain_on_engine
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.transformers_methods import assisted, assisted_refusal
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import results, run_session
from hf_specdec.bench.tasks import collecting
from hf_specdec.bench.tasks.collecting import Contender
from hf_specdec.models.better_transformer import to_better_transformer, to_eager_attention


def run_ablation(settings: Settings, shared: Processes) -> None:
    """Measures all rows, writes JSON and markdown into `settings.output_dir`, prints the table.

    Raises `BenchError` for what the user can put right, a model without Better Transformer included.
    """
    results.check_output(settings)
    dialogues = questions.dialogues(settings)
    pair = load_pair(settings)
    # Refuses before anything is measured; the rows switch it on and off themselves.
    better_transformer(pair)
    contenders = [Contender(method, pair) for method in rows(settings, pair)]
    result = collecting.collect(settings, contenders, dialogues, shared)
    if result is None:
        return
    for model in result["models"].values():
        model["attention"] = "eager or Better Transformer"
    run_session.finish_briefly(result, settings, ablation_tables.terminal)


def rows(settings: Settings, pair: LoadedPair) -> list[Method]:
    """With and without KV cache and Better Transformer: plain generate(), plain on our loop, ours.

    With a cache, without which it refuses, transformers' assisted generation too.
    """
    keywords = chosen_keywords(settings, pair)
    methods = [plain(), plain_on_engine(keywords), ours(settings.generation_strategy, keywords, pair)]
    found = []
    for cache, better in product((False, True), repeat=2):
        these = list(methods)
        if cache and assisted_refusal(settings, pair) is None:
            these.insert(2, assisted(settings, pair))
        found += [_switched(method, cache, better) for method in these if method.takes(settings.batch_size)]
    return found


def _switched(method: Method, cache: bool, better: bool) -> Method:
    inner = method.surroundings

    @contextmanager
    def surroundings(loaded: LoadedPair) -> Iterator[Any]:
        for model in loaded.models:
            # Without this, rows of both kinds would use SDPA: it is transformers' default.
            (to_better_transformer if better else to_eager_attention)(model)
        with inner(loaded) as log:
            yield log

    switches = f"{'cache' if cache else 'no cache'}+{'better' if better else 'eager'}"
    words = f"{'with' if cache else 'without'} KV cache, {'Better Transformer' if better else 'eager'}"
    return replace(
        method,
        name=f"{method.name}+{switches}",
        title=f"{method.title}, {words}",
        same_engine=None if method.same_engine is None else f"{method.same_engine}+{switches}",
        keywords={**method.keywords, "use_cache": cache},
        facts={"speculative": method.draft is not None, "cache": cache, "better_transformer": better},
        surroundings=surroundings,
    )
