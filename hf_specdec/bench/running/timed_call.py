"""One timed call of generate() on a batch of prompts, with all data that figures need."""

from __future__ import annotations

import hashlib
import resource
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.inputs.recordings import model_inputs, pad_token
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Call
from hf_specdec.bench.running.methods import Contender
from hf_specdec.bench.settings import Settings

_REPEATS_APART = 1_000_003  # distance between the seeds of repeats, if each has its own


class TimingStreamer(BaseStreamer):
    """Notes when new tokens reach the caller, and passes everything on to `inner` if there is one.

    The first put of every method is the prompt, of which only the length is noted. `times` are clock readings in
    seconds.
    """

    def __init__(self, inner: BaseStreamer | None = None):
        self.inner = inner
        self.times: list[float] = []
        self.counts: list[int] = []
        self.prompt_length: int | None = None

    def put(self, value: Tensor) -> None:
        if self.prompt_length is not None:
            self.times.append(time.perf_counter())
            self.counts.append(value.numel())
        else:
            self.prompt_length = value.shape[-1]
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        if self.inner is not None:
            self.inner.end()


def synchronize(pair: LoadedPair) -> None:
    """Wait until every device of the pair has finished its queued work."""
    for device in {model.device for model in pair.models}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def timed_call(
    contender: Contender,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    repeat: int = 0,
    position: int = 0,
    inner: BaseStreamer | None = None,
) -> Call:
    """Time generate() on `prompts`, padded on the left to one length.

    With `settings.endless` no text ends before `max_new_tokens`, and each repeat has its own seed: few texts are
    compared there, and none must favour a method. Otherwise all repeats use the same seed.

    Args:
        inner: the caller's streamer, at batch size 1.

    Raises:
        RuntimeError: the tokens returned are not those that were streamed.
    """
    pair = contender.pair
    inputs = _generate_inputs(pair, prompts)
    streamer = TimingStreamer(inner)
    # Seeded by the example's index, so that draws do not depend on what ran before or in other processes.
    torch.manual_seed(seed_of(settings, prompts[0], repeat if settings.endless else 0))
    with _ending(pair, settings.endless), contender.surroundings(pair) as log:
        synchronize(pair)
        _reset_peak(pair)
        generate = contender.generate or pair.target.generate
        start = time.perf_counter()
        # No dict is requested: it would return the cache, and static caches would have to be copied for that.
        sequences = generate(
            **inputs,
            max_new_tokens=settings.max_new_tokens,
            pad_token_id=pad_token(pair),
            streamer=streamer,
            **settings.generate_kwargs(),
            **contender.options,
        )
        synchronize(pair)
        seconds = time.perf_counter() - start
    before = streamer.prompt_length if pair.encoder_decoder else inputs["input_ids"].shape[1]
    new = sequences[:, before:].tolist()
    tokens = new if settings.endless else [pair.up_to_eos(row) for row in new]
    if len(prompts) == 1 and len(tokens[0]) != sum(streamer.counts):
        raise RuntimeError(f"{contender.name} streamed {sum(streamer.counts)} tokens but returned {len(tokens[0])}")
    rounds = contender.read_rounds(pair, tokens, streamer.counts, log)
    return Call(
        method=contender.name,
        prompts=tuple(prompt.index for prompt in prompts),
        repeat=repeat,
        position=position,
        seconds=seconds,
        first_seconds=streamer.times[0] - start,
        new_tokens=sum(map(len, tokens)),
        outputs=tuple(map(digest, tokens)),
        tokens=tuple(map(tuple, tokens)),
        peak_bytes=_peak(pair),
        **({"first_tokens": len(prompts)} if rounds is None else vars(rounds)),
    )


def _generate_inputs(pair: LoadedPair, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The prompts as arguments of generate()."""
    inputs: dict[str, Any] = dict(model_inputs(pair, prompts, pair.target))
    if pair.extractor is not None:
        # Otherwise Whisper cuts what it returns, and may decode a recording again.
        inputs["force_unique_generate_call"] = True
    return inputs


def seed_of(settings: Settings, prompt: Prompt, repeat: int) -> int:
    """The seed of the draws for a prompt in a repeat."""
    return settings.seed + prompt.index + _REPEATS_APART * repeat


def with_texts(call: Call, pair: LoadedPair) -> Call:
    """Add the answers as texts to a call."""
    decode = pair.tokenizer.decode
    return replace(call, texts=tuple(decode(row, skip_special_tokens=True).strip() for row in call.tokens or ()))


def digest(tokens: Sequence[int]) -> str:
    """A hash of the tokens."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=6).hexdigest()


def _reset_peak(pair: LoadedPair) -> None:
    if pair.target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(pair.target.device)
        return
    # Where it cannot be reset, such as outside Linux, the peak is that of the process so far.
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak(pair: LoadedPair) -> int:
    """Peak bytes since `_reset_peak`, of the target's GPU or of this process."""
    if pair.target.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(pair.target.device))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _ending(pair: LoadedPair, endless: bool) -> Iterator[None]:
    """Disable EOS within the block if `endless`, so that all methods decode the same number of tokens."""
    saved = [model.generation_config.eos_token_id for model in pair.models]
    for model in pair.models if endless else ():
        model.generation_config.eos_token_id = None
    try:
        yield
    finally:
        for model, token in zip(pair.models, saved, strict=True):
            model.generation_config.eos_token_id = token
