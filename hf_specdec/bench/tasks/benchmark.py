"""The task `benchmark`: prompts of exact lengths, decoded by every method in turn, into one report."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from hf_specdec.bench.figures.speed import pooled_forwards
from hf_specdec.bench.inputs.prompts import Prompt, benchmark_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.bare_passes import RawForwards
from hf_specdec.bench.running.methods import Method, assisted_refusal, lookahead, methods_for
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_call import interleaved, run_once, warm_up
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.run_session import RunSession, finish, forwards_key, run_key, without_kind

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
    finish(result, settings)
    sys.stdout.write(rendering.render(result))


def measure(settings: Settings, pair: LoadedPair, methods: list[Method], prompts: list[Prompt]) -> dict[str, Any]:
    """All runs and raw forwards, as the dict that the JSON will hold; what the journal holds is not run again."""
    result = results.new(settings, pair, methods, prompts)
    sitting = RunSession(settings, Processes())
    forwards = RawForwards(pair, lookahead(settings, pair), settings.max_new_tokens)
    order = list(interleaved(prompts, methods, settings.repeats))
    keys = [run_key(repeat, prompt.index, method.name) for repeat, prompt, method in order]
    if not sitting.done.keys() >= set(keys):
        warm_up(pair, methods, prompts, settings)
    bar = tqdm(order, desc="benchmark", unit="run", file=sys.stderr)
    for position, (repeat, prompt, method) in enumerate(bar):
        if keys[position] not in sitting.done:
            run = run_once(pair, method, prompt, settings, repeat=repeat, position=position)
            sitting.keep({"kind": "run", **vars(run)})
        # After the last method of each prompt, so that raw forwards meet the same state of the machine as
        # runs do.
        last = (position + 1) % len(methods) == 0
        if last and forwards_key(repeat, prompt.index, pair.draft_name) not in sitting.done:
            about = {"kind": "forwards", "repeat": repeat, "prompt": prompt.index, "draft": pair.draft_name}
            sitting.keep(about | {"times": forwards.sample(prompt)})
    result["runs"] = [without_kind(sitting.done[key]) for key in keys]
    for length in dict.fromkeys(len(prompt.token_ids) for prompt in prompts):
        same = {prompt.index for prompt in prompts if len(prompt.token_ids) == length}
        samples = [r["times"] for r in sitting.done.values() if r["kind"] == "forwards" and r["prompt"] in same]
        result["raw_forwards"][str(length)] = pooled_forwards(samples)
    sitting.conclude(result)
    return result
