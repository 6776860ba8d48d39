"""The task `benchmark`: prompts of exact lengths, decoded by every method in turn, into one report."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from hf_specdec.bench import environment, rendering, results
from hf_specdec.bench.data import Prompt, benchmark_prompts
from hf_specdec.bench.loading import LoadedPair, load_pair
from hf_specdec.bench.measure import interleaved, run_once, warm_up
from hf_specdec.bench.methods import Method, assisted_refusal, lookahead, methods_for
from hf_specdec.bench.raw_forwards import RawForwards
from hf_specdec.bench.settings import Settings

PROMPTS_PER_LENGTH = 5


def run_benchmark(settings: Settings) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the markdown.

    Raises `BenchError` for what the user can put right, before heavy work where that can be known before.
    """
    results.check_writable(settings.output_dir)
    pair = load_pair(settings)
    prompts = benchmark_prompts(pair, settings.prompt_lengths, PROMPTS_PER_LENGTH, settings.max_new_tokens)
    result = measure(settings, pair, methods_for(settings, pair), prompts)
    if refusal := assisted_refusal(settings, pair):
        result["notes"].append(refusal)
    results.save(result, settings)
    sys.stdout.write(rendering.render(result))


def measure(settings: Settings, pair: LoadedPair, methods: list[Method], prompts: list[Prompt]) -> dict[str, Any]:
    """All runs and raw forwards, as the dict that the JSON will hold."""
    result = results.new(settings, pair, methods, prompts)
    gamma = lookahead(settings, pair)
    forwards = RawForwards(pair, gamma, settings.max_new_tokens)
    warm_up(pair, methods, prompts, settings)
    order = list(interleaved(prompts, methods, settings.repeats))
    for position, (repeat, prompt, method) in enumerate(tqdm(order, desc="benchmark", unit="run", file=sys.stderr)):
        run = run_once(pair, method, prompt, settings, repeat=repeat, position=position)
        result["runs"].append(vars(run))
        # After the last method of each prompt, so that raw forwards meet the same state of the machine as
        # runs do.
        if (position + 1) % len(methods) == 0:
            forwards.sample(prompt)
    result["raw_forwards"] = forwards.times
    result["environment"]["load_average_at_end"] = environment.load_average()
    return result
