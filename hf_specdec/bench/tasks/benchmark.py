"""The task `benchmark`: prompts of exact lengths, decoded by every method in turn, into one report."""

from __future__ import annotations

import sys

from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.methods_by_task import of_benchmark
from hf_specdec.bench.running.transformers_methods import assisted_refusal
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.run_session import finish
from hf_specdec.bench.tasks.interleaving import batches_of, measured

PROMPTS_PER_LENGTH = 5


def run_benchmark(settings: Settings) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the markdown.

    Raises `BenchError` for what the user can put right, before heavy work where that can be known before.
    """
    results.check_writable(settings.output_dir)
    pair = load_pair(settings)
    count = max(PROMPTS_PER_LENGTH, settings.batch_size)
    prompts = benchmark_prompts(pair, settings.prompt_lengths, count, settings.max_new_tokens)
    batches = batches_of(prompts, settings, len(prompts))
    result = measured(settings, pair, of_benchmark(settings, pair), prompts, batches)
    if settings.assisted_generation and (refusal := assisted_refusal(settings, pair)):
        result["notes"].append(refusal)
    finish(result, settings)
    sys.stdout.write(rendering.render(result))
