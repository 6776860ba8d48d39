"""One timed call of generate() over a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import hf_specdec
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.methods import Method
from hf_specdec.bench.running.timed_call import TimingStreamer, synchronize
from hf_specdec.bench.settings import Settings

# One list per row of the batch, and one number a round.
_PER_ROW = ("drafted", "accepted", "new_tokens", "overlap")
_PER_ROUND = ("draft_steps", "width")

_REPEATS_APART = 1_000_003  # between their seeds


@dataclass(frozen=True)
class BatchRun:
    """One call of generate() on a batch of prompts of one length; JSON-serialisable through `vars`.

    `group` is the index of the first prompt. `first_seconds` runs from the call to the first delivery, `seconds` is
    the whole call. `rounds` maps each figure of a round to its values, one entry a round and in it one a row
    (`draft_steps` and `width` are the batch's); None for plain decoding, `overlap` None where it isn't told.
    """

    batch: int
    length: int
    group: int
    method: str
    repeat: int
    position: int
    seconds: float
    first_seconds: float
    tokens: list[list[int]]
    rounds: dict[str, Any] | None


def run_batch(
    pair: LoadedPair,
    method: Method,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    repeat: int = 0,
    position: int = 0,
) -> BatchRun:
    """As `measure.run_once`, for a batch, and with as many new tokens in every row as may be: texts don't end."""
    input_ids = torch.tensor([prompt.token_ids for prompt in prompts], device=pair.target.device)
    streamer = TimingStreamer()
    # Each repeat draws anew: few texts are compared here, and a method must not live by one that suits it.
    torch.manual_seed(settings.seed + prompts[0].index + _REPEATS_APART * repeat)
    with endless(pair), method.surroundings(pair) as log:
        synchronize(pair)
        start = time.perf_counter()
        # Without a dict: it would keep the cache, which static engines have to copy for that.
        sequences = pair.target.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=settings.max_new_tokens,
            streamer=streamer,
            **settings.generate_kwargs(),
            **method.options,
        )
        synchronize(pair)
        seconds = time.perf_counter() - start
    before = 1 if pair.encoder_decoder else input_ids.shape[1]
    tokens = sequences[:, before:].tolist()
    if any(len(row) != settings.max_new_tokens for row in tokens):
        raise RuntimeError(f"{method.name} decoded {len(tokens[0])} tokens instead of {settings.max_new_tokens}")
    return BatchRun(
        batch=len(prompts),
        length=len(prompts[0].token_ids),
        group=prompts[0].index,
        method=method.name,
        repeat=repeat,
        position=position,
        seconds=seconds,
        first_seconds=streamer.times[0] - start,
        tokens=tokens,
        rounds=_rounds(pair, method, sequences, streamer.counts, log),
    )


@contextmanager
def endless(pair: LoadedPair) -> Any:
    """Without EOS, so that all methods decode the same number of tokens; put back afterwards."""
    saved = [model.generation_config.eos_token_id for model in pair.models]
    for model in pair.models:
        model.generation_config.eos_token_id = None
    try:
        yield
    finally:
        for model, token in zip(pair.models, saved, strict=True):
            model.generation_config.eos_token_id = token


def _rounds(
    pair: LoadedPair, method: Method, sequences: Tensor, puts: Sequence[int], log: Any
) -> dict[str, Any] | None:
    """Column by column, which takes a third of the room of one dict a round."""
    stats = hf_specdec.last_speculation(pair.target) if "generation_strategy" in method.options else None
    if stats is not None:
        columns: dict[str, Any] = {key: [list(getattr(item, key)) for item in stats.rounds] for key in _PER_ROW}
        columns |= {key: [getattr(item, key) for item in stats.rounds] for key in _PER_ROUND}
        columns["overlap"] = [[round(value, 4) for value in row] for row in columns["overlap"]]
        return columns
    records = method.read_rounds(SimpleNamespace(sequences=sequences), puts, log)
    if records is None:
        return None
    columns = {key: [[getattr(item, key)] for item in records] for key in _PER_ROW}
    columns |= {key: [getattr(item, key) for item in records] for key in _PER_ROUND}
    if any(value is None for (value,) in columns["overlap"]):
        columns["overlap"] = None
    return columns
