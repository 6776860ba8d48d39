"""The task `growth`: many calls in a row on each engine, to see whether memory or compiled graphs grow."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from tqdm import tqdm

from hf_specdec.bench.inputs.prompts import Prompt, benchmark_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.methods import Method
from hf_specdec.bench.running.methods_by_task import of_growth
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import results

SAMPLES = 20
_PROMPTS_PER_LENGTH = 4


def run_growth(settings: Settings) -> None:
    """Calls, writes JSON and markdown into `settings.output_dir`, prints the markdown.

    Raises `BenchError` for what the user can put right.
    """
    results.check_output(settings)
    pair = load_pair(settings)
    prompts = benchmark_prompts(pair, settings.prompt_lengths, _PROMPTS_PER_LENGTH, settings.max_new_tokens)
    methods = of_growth(settings, pair)
    result = results.new(settings, pair, methods, prompts)
    result["samples"] = [
        {"method": method.name, **sample} for method in methods for sample in calls(settings, pair, method, prompts)
    ]
    results.save(result, settings)
    sys.stdout.write(rendering.render(result))


def calls(settings: Settings, pair: LoadedPair, method: Method, prompts: list[Prompt]) -> Iterator[dict[str, Any]]:
    """Calls on the prompts in turn, `settings.calls` in all; yields `SAMPLES` evenly spaced samples of the process."""
    wanted = {round(1 + (settings.calls - 1) * number / (SAMPLES - 1)) for number in range(SAMPLES)}
    for number in tqdm(range(1, settings.calls + 1), desc=method.name, unit="call", file=sys.stderr):
        # Neighbours differ in length, so that an engine that depends on it would compile again.
        prompt = prompts[(number * _PROMPTS_PER_LENGTH + number // len(prompts)) % len(prompts)]
        timed_call(pair, method, [prompt], settings)
        if number in wanted:
            yield {"calls": number, **sample()}


def sample() -> dict[str, int]:
    """Bytes that the process holds, in memory and on the GPU, and graphs compiled so far by torch.compile."""
    gc.collect()
    compiled = sys.modules.get("torch._dynamo.utils")
    return {
        "resident_bytes": psutil.Process().memory_info().rss,
        "device_bytes": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        "graphs": 0 if compiled is None else compiled.counters["stats"]["unique_graphs"],
    }
