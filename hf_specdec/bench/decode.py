"""The task `decode`: prompts answered one by one, their text streamed to stdout, and a table after."""

from __future__ import annotations

import sys

from transformers import TextStreamer

from hf_specdec.bench import rendering, results
from hf_specdec.bench.data import decode_prompts
from hf_specdec.bench.loading import load_pair
from hf_specdec.bench.measure import run_once, warm_up
from hf_specdec.bench.methods import plain, strategy
from hf_specdec.bench.settings import BenchError, Settings


def run_decode(settings: Settings) -> None:
    """Decodes with the chosen strategy, or plainly; prints a table and writes files as `benchmark` does.

    Raises `BenchError` for what the user can put right.
    """
    for number, text in enumerate(settings.prompts, start=1):
        if not text.strip():
            raise BenchError(f"--prompt: prompt {number} is empty ({text!r}); give some text to go on from")
    results.check_writable(settings.output_dir)
    pair = load_pair(settings)
    prompts, notes = decode_prompts(pair, settings.prompts, settings.max_new_tokens)
    for note in notes:
        print(note, file=sys.stderr)
    method = strategy(settings, pair) if settings.assisted_generation else plain()
    result = results.new(settings, pair, [method], prompts)
    result["notes"] = notes
    warm_up(pair, [method], prompts[:1], settings)
    for repeat in range(settings.repeats):
        for prompt in prompts:
            shown = repeat == 0
            if shown:
                print(f"--- {prompt.index + 1}: {prompt.label}, {len(prompt.token_ids)} tokens")
            shower = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True) if shown else None
            position = len(result["runs"])
            run = run_once(pair, method, prompt, settings, repeat=repeat, position=position, inner=shower)
            result["runs"].append(vars(run))
    results.save(result, settings)
    sys.stdout.write("\n" + rendering.render(result))
