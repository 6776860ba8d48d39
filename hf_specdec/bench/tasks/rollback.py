"""The task `rollback`: the cost of taking rejected drafts out of recurrent states, and the speedup that is left."""

from __future__ import annotations

import sys

from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.methods_by_task import of_rollback
from hf_specdec.bench.running.rollback_passes import rollback_times
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.columns import rounded
from hf_specdec.bench.storage.run_session import finish
from hf_specdec.bench.tasks.interleaving import batches_of, measured
from hf_specdec.models.cache_rollback import has_recurrent_layers

PROMPTS, REPEATS = 1, 7  # of the passes; calls are repeated as often as asked for


def run_rollback(settings: Settings) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the markdown.

    A run that was killed goes on where it stopped. Raises `BenchError` for what the user can put right.
    """
    results.check_output(settings)
    pair = load_pair(settings)
    if not has_recurrent_layers(pair.target):
        raise BenchError(
            f"--model_name: {settings.model_name!r} has no recurrent layers to roll back; choose one that has, such as "
            "synthetic:falcon-h1-0.5b"
        )
    methods = of_rollback(settings, pair)
    spare = max(method.longest for method in methods)
    rows = settings.limit or PROMPTS
    count = max(rows, settings.batch_size)
    prompts = benchmark_prompts(pair, settings.prompt_lengths, count, settings.max_new_tokens, spare=spare)
    result = measured(settings, pair, methods, prompts, batches_of(prompts, settings, rows))
    result["rollback"] = rounded(rollback_times(pair, prompts[0].token_ids, spare, REPEATS))
    finish(result, settings)
    sys.stdout.write(rendering.render(result))
