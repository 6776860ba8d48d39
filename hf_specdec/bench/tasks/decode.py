"""The task `decode`: prompts answered one by one, their texts streamed to stdout, and then measured as in benchmark."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from transformers import TextStreamer

from hf_specdec.bench.inputs.prompts import Prompt, decode_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.methods import Method
from hf_specdec.bench.running.methods_by_task import of_benchmark
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.run_session import finish
from hf_specdec.bench.tasks.interleaving import measured


def run_decode(settings: Settings) -> None:
    """Shows the answers of the chosen strategy, or of plain decoding; then compares it with its baselines.

    Prints a table and writes files as `benchmark` does. Raises `BenchError` for what the user can put right.
    """
    for number, text in enumerate(settings.prompts, start=1):
        if not text.strip():
            raise BenchError(f"--prompt: prompt {number} is empty ({text!r}); give some text to go on from")
    results.check_output(settings)
    pair = load_pair(settings)
    prompts, notes = decode_prompts(pair, settings.prompts, settings.max_new_tokens)
    for note in notes:
        print(note, file=sys.stderr)
    methods = of_benchmark(settings, pair)
    size = settings.batch_size
    batches = [tuple(prompts[at : at + size]) for at in range(0, len(prompts), size)]
    for batch in batches:
        _show(pair, methods[-1], batch, settings)
    result = measured(settings, pair, methods, prompts, [batches])
    result["notes"] += notes
    finish(result, settings)
    sys.stdout.write("\n" + rendering.render(result))


def _show(pair: LoadedPair, method: Method, batch: Sequence[Prompt], settings: Settings) -> None:
    """The answers to one batch; that to a single prompt as it is written."""
    if len(batch) == 1:
        print(_heading(batch[0]))
        streamer = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
        timed_call(pair, method, batch, settings, inner=streamer)
        return
    call = timed_call(pair, method, batch, settings)
    for prompt, tokens in zip(batch, call.tokens, strict=True):
        print(_heading(prompt))
        print(pair.tokenizer.decode(tokens, skip_special_tokens=True))


def _heading(prompt: Prompt) -> str:
    return f"--- {prompt.index + 1}: {prompt.label}, {len(prompt.token_ids)} tokens"
