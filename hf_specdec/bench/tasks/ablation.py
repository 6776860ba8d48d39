"""Measures what speculation, the KV cache and Better Transformer each contribute: each switched on and off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

from hf_specdec.bench import results
from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import Part, whole
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.models.loading import LoadedPair, better_transformer, load_pair
from hf_specdec.bench.records import Method, Result
from hf_specdec.bench.reports import columns
from hf_specdec.bench.reports.columns import Columns, method_table
from hf_specdec.bench.reports.document import Block
from hf_specdec.bench.reports.heading import heading, remarks, terminal
from hf_specdec.bench.reports.markdown import capital, ratio
from hf_specdec.bench.running.measuring import measured_questions
from hf_specdec.bench.running.methods import Contender, chosen_keywords, ours, plain, plain_on_engine
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.transformers_methods import assisted, assisted_refusal, can_assist
from hf_specdec.bench.settings import Settings
from hf_specdec.models.better_transformer import to_better_transformer, to_eager_attention

LEGEND = (
    f"{columns.SPEED} Baselines have the same cache and attention. Rows without Better Transformer use eager attention "
    "in both models."
)


def run(settings: Settings, shared: Processes) -> None:
    """Measure all rows, write the result and its report into `settings.output_dir`, print the table."""
    dialogues = questions.dialogues(settings)
    pair = load_pair(settings)
    # Called only to refuse early; the rows switch it on and off themselves.
    better_transformer(pair)
    result = measured_questions(settings, rows(settings, pair), dialogues, shared)
    if result is not None:
        attention = "eager or Better Transformer"
        result.models = {role: replace(model, attention=attention) for role, model in result.models.items()}
        results.finish(result, render)
        part = whole(result)
        sys.stdout.write(terminal([ablation_table(part), *remarks(part)]))


def rows(settings: Settings, pair: LoadedPair) -> list[Contender]:
    """Plain generate(), plain on our loop and our strategy, each with and without KV cache and Better Transformer.

    transformers' assisted generation takes part with a cache only, since it refuses to run without.
    """
    keywords = chosen_keywords(settings, pair)
    listed = [plain(pair), plain_on_engine(keywords, pair), ours(settings.generation_strategy, keywords, pair)]
    found = []
    for cache, better in product((False, True), repeat=2):
        these = list(listed)
        if cache and can_assist(pair) and assisted_refusal(settings, pair) is None:
            these.insert(2, assisted(settings, pair))
        found += [_switched(one, cache, better) for one in these]
    return found


def _switched(one: Contender, cache: bool, better: bool) -> Contender:
    inner, method = one.surroundings, one.method

    @contextmanager
    def surroundings(loaded: LoadedPair) -> Iterator[Any]:
        for model in loaded.models:
            # SDPA is transformers' default, so rows without Better Transformer must ask for eager attention.
            (to_better_transformer if better else to_eager_attention)(model)
        with inner(loaded) as log:
            yield log

    switches = f"{'cache' if cache else 'no cache'}+{'better' if better else 'eager'}"
    words = f"{'with' if cache else 'without'} KV cache, {'Better Transformer' if better else 'eager'}"
    return replace(one, surroundings=surroundings).told(
        name=f"{method.name}+{switches}",
        title=f"{method.title}, {words}",
        same_engine=None if method.same_engine is None else f"{method.same_engine}+{switches}",
        keywords={**method.keywords, "use_cache": cache},
        cache=cache,
        better_transformer=better,
    )


def render(result: Result) -> list[Block]:
    """Compose the report."""
    part = whole(result)
    return [heading(part), LEGEND, ablation_table(part), *remarks(part)]


def ablation_table(part: Part) -> str:
    """A table with one row per combination."""
    first = part.methods[0].name

    def over_first(part: Part, method: Method) -> str:
        return "–" if method.name == first else ratio(speed.speedup(part, method.name, first))

    shown: Columns = {
        # Cache and attention have their own columns.
        "Method": lambda part, method: capital(method.title.split(", with")[0]),
        **columns.N,
        "Speculative decoding": lambda part, method: _yes(method.draft is not None),
        "KV cache": lambda part, method: _yes(method.cache),
        "Better Transformer": lambda part, method: _yes(method.better_transformer),
        **columns.RATE,
        "Speedup over the first row": over_first,
        **columns.over(part.result, "plain"),
        **columns.over(part.result, "engine"),
        **columns.END_TO_END,
        **columns.ACCEPTANCE,
        **columns.TOKENS,
        **columns.EQUAL,
    }
    return method_table({"": part}, shown)


def _yes(switch: bool | None) -> str:
    return "yes" if switch else "no"
