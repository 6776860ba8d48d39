"""Runs methods on prompts and keeps every raw time; warm-up, clock and counter are the same for all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.methods import Method, as_dicts
from hf_specdec.bench.settings import BenchError, Settings


@dataclass(frozen=True)
class Run:
    """One call of generate(): all that figures are computed from, JSON-serialisable through `vars`.

    `puts` holds [seconds since the call, tokens] for each time that the streamer was given new tokens,
    `seconds` the whole call, `tokens` the new tokens with EOS. `rounds` holds `RoundRecord`s as dicts, None
    for plain decoding. `position` is the run's place in the order in which all runs were made.
    """

    prompt: int
    method: str
    repeat: int
    position: int
    seconds: float
    puts: list[list[float]]
    tokens: list[int]
    rounds: list[dict[str, Any]] | None


class TimingStreamer(BaseStreamer):
    """Notes when new tokens reach the caller, and passes everything on to `inner` where there is one.

    The first put of every method is the prompt and is not noted. `times` are clock readings in seconds.
    """

    def __init__(self, inner: BaseStreamer | None = None):
        self.inner = inner
        self.times: list[float] = []
        self.counts: list[int] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
            self.counts.append(value.numel())
        self._prompt_seen = True
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        if self.inner is not None:
            self.inner.end()


def synchronize(pair: LoadedPair) -> None:
    """Waits until every device of the pair has done what was queued on it."""
    for device in {model.device for model in pair.models}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def run_once(
    pair: LoadedPair,
    method: Method,
    prompt: Prompt,
    settings: Settings,
    *,
    repeat: int = 0,
    position: int = 0,
    inner: BaseStreamer | None = None,
) -> Run:
    """One timed call of generate() at batch size 1; `inner` is a streamer of the caller's own."""
    input_ids = torch.tensor([prompt.token_ids], device=pair.target.device)
    streamer = TimingStreamer(inner)
    # From the example's index: the same draws whatever ran before, and whoever else shares the examples.
    torch.manual_seed(settings.seed + prompt.index)
    with method.surroundings(pair) as log:
        synchronize(pair)
        start = time.perf_counter()
        output = pair.target.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=settings.max_new_tokens,
            pad_token_id=_pad_token(pair),
            return_dict_in_generate=True,
            streamer=streamer,
            **settings.generate_kwargs(),
            **method.options,
        )
        synchronize(pair)
        seconds = time.perf_counter() - start
    first = 1 if pair.encoder_decoder else input_ids.shape[1]
    tokens = output.sequences[0, first:].tolist()
    if len(tokens) != sum(streamer.counts):
        raise RuntimeError(f"{method.name} streamed {sum(streamer.counts)} tokens but returned {len(tokens)}")
    return Run(
        prompt=prompt.index,
        method=method.name,
        repeat=repeat,
        position=position,
        seconds=seconds,
        puts=[[at - start, count] for at, count in zip(streamer.times, streamer.counts, strict=True)],
        tokens=tokens,
        rounds=as_dicts(method.read_rounds(output, streamer.counts, log)),
    )


def warm_up(pair: LoadedPair, methods: Sequence[Method], prompts: Sequence[Prompt], settings: Settings) -> None:
    """Every method once on the first prompt of each length, uncounted.

    As the first use of the models it is also where they refuse what they can't do: `BenchError`, in one line.
    """
    firsts = {len(prompt.token_ids): prompt for prompt in reversed(prompts)}
    for prompt in firsts.values():
        for method in methods:
            try:
                run_once(pair, method, prompt, settings)
            except ValueError as error:
                raise BenchError(" ".join(str(error).split())) from error


def interleaved(
    prompts: Sequence[Prompt], methods: Sequence[Method], repeats: int
) -> Iterator[tuple[int, Prompt, Method]]:
    """The order of all runs, as (repeat, prompt, method).

    Methods take turns on each prompt, so that drift of the machine hits all alike, and the one that begins
    changes from prompt to prompt and from repeat to repeat, so that none always follows the same other.
    """
    for repeat in range(repeats):
        for prompt in prompts:
            shift = (repeat + prompt.index) % len(methods)
            for method in [*methods[shift:], *methods[:shift]]:
                yield repeat, prompt, method


def _pad_token(pair: LoadedPair) -> int | None:
    """Only silences a warning: at batch size 1 nothing is padded."""
    if pair.tokenizer.pad_token_id is not None:
        return pair.tokenizer.pad_token_id
    return pair.tokenizer.eos_token_id
