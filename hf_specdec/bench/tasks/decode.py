"""The task `decode`: prompts answered one by one, their text streamed to stdout, and a table after."""

from __future__ import annotations

import sys

from transformers import TextStreamer

from hf_specdec.bench.inputs.prompts import Prompt, decode_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.methods import Method, plain, strategy
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_call import run_once, warm_up
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.journal import Record
from hf_specdec.bench.storage.run_session import RunSession, finish, run_key, without_kind


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
    sitting = RunSession(settings, Processes())
    work = [(repeat, prompt) for repeat in range(settings.repeats) for prompt in prompts]
    if not all(run_key(repeat, prompt.index, method.name) in sitting.done for repeat, prompt in work):
        warm_up(pair, [method], prompts[:1], settings)
    for position, (repeat, prompt) in enumerate(work):
        result["runs"].append(_run(sitting, pair, method, prompt, settings, repeat, position))
    sitting.conclude(result)
    finish(result, settings)
    sys.stdout.write("\n" + rendering.render(result))


def _run(
    sitting: RunSession,
    pair: LoadedPair,
    method: Method,
    prompt: Prompt,
    settings: Settings,
    repeat: int,
    position: int,
) -> Record:
    """One run from the journal or measured now; its text is shown in the first repeat."""
    shower = None
    if repeat == 0:
        print(f"--- {prompt.index + 1}: {prompt.label}, {len(prompt.token_ids)} tokens")
        shower = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    key = run_key(repeat, prompt.index, method.name)
    if key not in sitting.done:
        run = run_once(pair, method, prompt, settings, repeat=repeat, position=position, inner=shower)
        sitting.keep({"kind": "run", **vars(run)})
    elif shower is not None:
        print(pair.tokenizer.decode(sitting.done[key]["tokens"], skip_special_tokens=True))
    return without_kind(sitting.done[key])
