"""One timed call of generate() on a batch of prompts, with everything that figures need from it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.methods import Method
from hf_specdec.bench.running.round_records import Rounds, Spent
from hf_specdec.bench.settings import Settings

_REPEATS_APART = 1_000_003  # between their seeds, where each repeat draws anew


@dataclass(frozen=True)
class Call:
    """One call of generate(); batches have one entry a row.

    Args:
        method: its name.
        prompts: the rows' indexes.
        repeat: from 0.
        position: the call's place in the order in which all calls were made.
        seconds: of the whole call.
        first_seconds: from the call to the first delivery.
        tokens: new tokens of each row, EOS included, padding not.
        rounds: what each round drafted and accepted; None for plain decoding.
        spent: seconds of the rounds after the first; None where the method doesn't tell.
        texts: the rows' tokens as text, where a task reads them.
        again: calls before this one that were thrown away, since passes were recorded or compiled in them.
        preparing: seconds that those calls took beyond as many like this one.
    """

    method: str
    prompts: tuple[int, ...]
    repeat: int
    position: int
    seconds: float
    first_seconds: float
    tokens: list[list[int]]
    rounds: Rounds | None = None
    spent: Spent | None = None
    texts: list[str] | None = None
    again: int = 0
    preparing: float = 0.0

    @property
    def batch(self) -> int:
        """How many rows were decoded at once."""
        return len(self.prompts)

    @property
    def prompt(self) -> int:
        """The index of the first row's prompt, which stands for the batch."""
        return self.prompts[0]


class TimingStreamer(BaseStreamer):
    """Notes when new tokens reach the caller, and passes everything on to `inner` where there is one.

    The first put of every method is the prompt and is not noted. `times` are clock readings in seconds.
    """

    def __init__(self, inner: BaseStreamer | None = None):
        self.inner = inner
        self.times: list[float] = []
        self.counts: list[int] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
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
    """Waits until every device of the pair has finished its queued work."""
    for device in {model.device for model in pair.models}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def timed_call(
    pair: LoadedPair,
    method: Method,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    repeat: int = 0,
    position: int = 0,
    inner: BaseStreamer | None = None,
) -> Call:
    """Times generate() on `prompts`, shorter ones padded on the left.

    With `settings.endless` no text ends before `max_new_tokens`, and each repeat draws anew: few texts are compared
    there, and no method must live by one that suits it. Otherwise all repeats draw the same.

    Args:
        inner: a streamer of the caller's own, at batch size 1.

    Raises:
        RuntimeError: the tokens returned are not those that were streamed.
    """
    ids, mask = _padded(prompts, pair)
    streamer = TimingStreamer(inner)
    # From the example's index: the same draws whatever ran before, and whoever else shares the examples.
    torch.manual_seed(settings.seed + prompts[0].index + settings.endless * _REPEATS_APART * repeat)
    with _ending(pair, settings.endless), method.surroundings(pair) as log:
        synchronize(pair)
        start = time.perf_counter()
        # Without a dict: it would hand out the cache, which static ones have to be copied for.
        sequences = method.generate(pair)(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=settings.max_new_tokens,
            pad_token_id=_pad_token(pair),
            streamer=streamer,
            **settings.generate_kwargs(),
            **method.options,
        )
        synchronize(pair)
        seconds = time.perf_counter() - start
    new = sequences[:, 1 if pair.encoder_decoder else ids.shape[1] :].tolist()
    tokens = new if settings.endless else [up_to_eos(row, pair) for row in new]
    if len(prompts) == 1 and len(tokens[0]) != sum(streamer.counts):
        raise RuntimeError(f"{method.name} streamed {sum(streamer.counts)} tokens but returned {len(tokens[0])}")
    rounds, spent = method.read_rounds(pair, tokens, streamer.counts, log)
    return Call(
        method=method.name,
        prompts=tuple(prompt.index for prompt in prompts),
        repeat=repeat,
        position=position,
        seconds=seconds,
        first_seconds=streamer.times[0] - start,
        tokens=tokens,
        rounds=rounds,
        spent=spent,
    )


def _padded(prompts: Sequence[Prompt], pair: LoadedPair) -> tuple[Tensor, Tensor]:
    """`[B, P]` ids, padded on the left (an encoder's on the right), and their mask."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    pad = _pad_token(pair) or 0
    ids, mask = [], []
    for prompt in prompts:
        missing = longest - len(prompt.token_ids)
        row = [[pad] * missing, list(prompt.token_ids)]
        seen = [[0] * missing, [1] * len(prompt.token_ids)]
        if pair.encoder_decoder:
            row.reverse()
            seen.reverse()
        ids.append([*row[0], *row[1]])
        mask.append([*seen[0], *seen[1]])
    device = pair.target.device
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@contextmanager
def _ending(pair: LoadedPair, endless: bool) -> Iterator[None]:
    """Without EOS where texts are endless, so that all methods decode the same number of tokens; put back later."""
    saved = [model.generation_config.eos_token_id for model in pair.models]
    for model in pair.models if endless else ():
        model.generation_config.eos_token_id = None
    try:
        yield
    finally:
        for model, token in zip(pair.models, saved, strict=True):
            model.generation_config.eos_token_id = token


def up_to_eos(row: list[int], pair: LoadedPair) -> list[int]:
    """A row without the padding behind its EOS."""
    stored: Any = pair.target.generation_config.eos_token_id
    ends = set(stored) if isinstance(stored, (list, tuple)) else {stored}
    length = next((place for place, token in enumerate(row, start=1) if token in ends), len(row))
    return row[:length]


def _pad_token(pair: LoadedPair) -> int | None:
    """The tokenizer's padding, or its EOS where it has none."""
    if pair.tokenizer.pad_token_id is not None:
        return int(pair.tokenizer.pad_token_id)
    stored = pair.tokenizer.eos_token_id
    return None if stored is None else int(stored)
