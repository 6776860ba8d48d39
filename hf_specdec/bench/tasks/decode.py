"""Answers prompts one by one, shows the answers as they come, and compares the methods as benchmark does."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from transformers import TextStreamer

from hf_specdec.bench import results
from hf_specdec.bench.inputs.prompts import Prompt, decode_prompts
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.running.measuring import measured
from hf_specdec.bench.running.methods import Contender
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import benchmark

render = benchmark.render


def run(settings: Settings, shared: Processes) -> None:
    """Show the answers of the chosen strategy, or of plain decoding; then compare it with its baselines.

    Prints and writes the report like `benchmark`.
    """
    for number, text in enumerate(settings.prompts, start=1):
        if not text.strip():
            raise BenchError(f"--prompt: prompt {number} is empty ({text!r}); give some text to continue")
    pair = load_pair(settings)
    prompts, notes = decode_prompts(pair, settings.prompts, settings.max_new_tokens)
    for note in notes:
        print(note, file=sys.stderr)
    contenders = benchmark.compared(settings, pair)
    size = settings.batch_size
    batches = [tuple(prompts[at : at + size]) for at in range(0, len(prompts), size)]
    for batch in batches:
        _show(contenders[-1], batch, settings)
    result = measured(settings, contenders, [batches])
    assert result is not None
    result.notes += notes
    sys.stdout.write("\n" + results.finish(result, render))


def _show(contender: Contender, batch: Sequence[Prompt], settings: Settings) -> None:
    """Print the answers to one batch; a single answer is streamed."""
    tokenizer = contender.pair.tokenizer
    if len(batch) == 1:
        print(_heading(batch[0]))
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        timed_call(contender, batch, settings, inner=streamer)
        return
    call = timed_call(contender, batch, settings)
    for prompt, tokens in zip(batch, call.tokens or (), strict=True):
        print(_heading(prompt))
        print(tokenizer.decode(tokens, skip_special_tokens=True))


def _heading(prompt: Prompt) -> str:
    return f"--- {prompt.index + 1}: {prompt.label}, {len(prompt.token_ids)} tokens"
