"""Warm-up: calls are repeated until their times settle; the times until then are kept as cold times."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Call, ColdStart
from hf_specdec.bench.running.methods import Contender
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.models.recorded_passes import trials_of
from hf_specdec.prepared.engine_store import STORE, kept_engines

SETTLED = 0.05  # two warm-up calls in a row differ by less than this share
MOST_WARM_UPS = 12
MOST_SECONDS = 60.0  # limit for warm-up calls after the first, which may compile; at least two calls are made
MOST_AGAIN = 4  # how often a call is repeated because something was prepared in it


def warm_up(
    contender: Contender, prompts: Sequence[Prompt], settings: Settings, *, most: int | None = None, number: int = 0
) -> ColdStart:
    """Call until times settle, at most `most` times (default: `MOST_WARM_UPS`) or for `MOST_SECONDS`.

    Args:
        number: the record's place in the order of warm-ups.

    Raises:
        BenchError: the models refuse the call; the reason in one line.
    """
    pair = contender.pair
    seconds: list[float] = []
    settled = False
    while not settled and len(seconds) < (most or MOST_WARM_UPS) and sum(seconds[1:]) < MOST_SECONDS:
        before, start = prepared_so_far(pair), time.perf_counter()
        try:
            timed_call(contender, prompts, settings)
        except ValueError as error:
            raise BenchError(" ".join(str(error).split())) from error
        seconds.append(time.perf_counter() - start)
        close = len(seconds) > 1 and abs(seconds[-1] - seconds[-2]) < SETTLED * seconds[-2]
        settled = close and prepared_so_far(pair) == before
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return ColdStart(contender.name, len(prompts), longest, tuple(seconds), settled, number)


def warm_call(contender: Contender, prompts: Sequence[Prompt], settings: Settings, **place: Any) -> Call:
    """Repeat `timed_call` until nothing was recorded or compiled in it."""
    thrown_away: list[float] = []
    while True:
        before = prepared_so_far(contender.pair)
        call = timed_call(contender, prompts, settings, **place)
        if prepared_so_far(contender.pair) == before or len(thrown_away) == MOST_AGAIN:
            more = max(0.0, sum(thrown_away) - call.seconds * len(thrown_away))
            return replace(call, again=len(thrown_away), preparing=more)
        thrown_away.append(call.seconds)


def prepared_so_far(pair: LoadedPair) -> tuple[int, ...]:
    """Count this process's graphs, the prepared steps and passes, and each model's recorded and verified passes."""
    compiled = sys.modules.get("torch._dynamo.utils")
    graphs = 0 if compiled is None else compiled.counters["stats"]["unique_graphs"]
    kept = (engine for compile in (False, True) for engine in kept_engines(pair.target, compile=compile))
    steps = sum(len(engine.steps) for engine in kept) + STORE.prepared_passes(pair.target)
    return (graphs, steps, *(trials_of(model) for model in pair.models))
