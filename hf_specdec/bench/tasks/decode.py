"""The task `decode`: prompts answered one by one, their text streamed to stdout, and a table after."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from transformers import TextStreamer

from hf_specdec.bench.inputs.prompts import Prompt, decode_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.methods import Method, chosen_keywords, ours, plain
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.running.warming import warm_up
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.run_session import RunSession, finish


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
    keywords = chosen_keywords(settings, pair)
    method = ours(settings.generation_strategy, keywords, pair) if settings.assisted_generation else plain()
    result = results.new(settings, pair, [method], prompts)
    result["notes"] += notes
    session = RunSession(settings, Processes())
    batches = [prompts[at : at + settings.batch_size] for at in range(0, len(prompts), settings.batch_size)]
    work = [(repeat, batch) for repeat in range(settings.repeats) for batch in batches]
    if not all(session.has_call(method.name, _indexes(batch), repeat) for repeat, batch in work):
        session.keep_cold(warm_up(pair, method, batches[0], settings))
    for position, (repeat, batch) in enumerate(work):
        _decode(session, pair, method, batch, settings, repeat, position)
    session.conclude(result)
    finish(result, settings)
    sys.stdout.write("\n" + rendering.render(result))


def _decode(
    session: RunSession,
    pair: LoadedPair,
    method: Method,
    batch: Sequence[Prompt],
    settings: Settings,
    repeat: int,
    position: int,
) -> None:
    """One batch, from the journal or now; its texts are shown in the first repeat, a single one as it comes."""
    known = session.has_call(method.name, _indexes(batch), repeat)
    streams = repeat == 0 and len(batch) == 1 and not known
    if streams:
        print(_heading(batch[0]))
    shower = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True) if streams else None
    if not known:
        call = timed_call(pair, method, batch, settings, repeat=repeat, position=position, inner=shower)
        session.keep_call(call)
    if repeat == 0 and not streams:
        call = session.call(method.name, _indexes(batch), repeat)
        for prompt, tokens in zip(batch, call.tokens, strict=True):
            print(_heading(prompt))
            print(pair.tokenizer.decode(tokens, skip_special_tokens=True))


def _heading(prompt: Prompt) -> str:
    return f"--- {prompt.index + 1}: {prompt.label}, {len(prompt.token_ids)} tokens"


def _indexes(batch: Sequence[Prompt]) -> tuple[int, ...]:
    return tuple(prompt.index for prompt in batch)
