"""The task `engines`: transformers' settings against ours on each engine and batch size, in one interleaved run."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from hf_specdec.bench.figures import bandwidth
from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.llama_cpp_methods import check_llama_cpp, llama_cpp_refusal
from hf_specdec.bench.running.methods_by_task import of_engines
from hf_specdec.bench.running.transformers_methods import assisted_refusal
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.run_session import finish
from hf_specdec.bench.tasks.interleaving import batches_of, measured

PROMPTS_PER_LENGTH = 8


def run_engines(settings: Settings) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the markdown.

    A run that was killed goes on where it stopped. Raises `BenchError` for what the user can put right.
    """
    results.check_output(settings)
    check_llama_cpp(settings)
    result = _measured(settings)
    finish(result, settings)
    sys.stdout.write(rendering.render(result))


def _measured(settings: Settings) -> dict[str, Any]:
    """Calls, bare passes and the memory's bandwidth."""
    pair = load_pair(settings)
    rows = settings.limit or PROMPTS_PER_LENGTH
    methods = of_engines(settings, pair)
    # Room for the drafts beyond the last token, too.
    spare = max(method.longest for method in methods)
    count = max(rows, *settings.batch_sizes)
    prompts = benchmark_prompts(pair, settings.prompt_lengths, count, settings.max_new_tokens, spare=spare)
    read_rate = partial(bandwidth.device_rate, pair.target.device)
    result = measured(settings, pair, methods, prompts, batches_of(prompts, settings, rows), read_rate=read_rate)
    context = settings.prompt_lengths[0] + settings.max_new_tokens // 2
    result["memory"] = bandwidth.describe(pair, context)
    for refusal in (assisted_refusal(settings, pair), llama_cpp_refusal(settings, pair)):
        if refusal is not None:
            result["notes"].append(refusal)
    return result
