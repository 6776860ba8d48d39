"""One timed call over a batch, and bare forward passes of the same batch on the same engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec.bench.data import Prompt
from hf_specdec.bench.loading import LoadedPair
from hf_specdec.bench.measure import TimingStreamer, synchronize
from hf_specdec.bench.methods import Method
from hf_specdec.bench.raw_forwards import build_step, text_behind
from hf_specdec.bench.settings import Settings
from hf_specdec.runner import pass_mode
from hf_specdec.static_cache import RowsCache
from hf_specdec.static_runner import StaticRunner, keeps_rows, static_pass

# One list per row of the batch, and one number a round.
_PER_ROW = ("drafted", "accepted", "new_tokens", "overlap")
_PER_ROUND = ("draft_steps", "width")


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
    torch.manual_seed(settings.seed + prompts[0].index)
    with endless(pair), method.surroundings(pair) as log:
        synchronize(pair)
        start = time.perf_counter()
        output = pair.target.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=settings.max_new_tokens,
            return_dict_in_generate=True,
            streamer=streamer,
            **settings.generate_kwargs(),
            **method.options,
        )
        synchronize(pair)
        seconds = time.perf_counter() - start
    before = 1 if pair.encoder_decoder else input_ids.shape[1]
    tokens = output.sequences[:, before:].tolist()
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
        rounds=_rounds(method, output, streamer.counts, log),
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


def _rounds(method: Method, output: Any, puts: Sequence[int], log: Any) -> dict[str, Any] | None:
    """Column by column, which takes a third of the room of one dict a round."""
    stats = getattr(output, "speculation", None)
    if stats is not None:
        columns: dict[str, Any] = {key: [list(getattr(item, key)) for item in stats.rounds] for key in _PER_ROW}
        columns |= {key: [getattr(item, key) for item in stats.rounds] for key in _PER_ROUND}
        columns["overlap"] = [[round(value, 4) for value in row] for row in columns["overlap"]]
        return columns
    records = method.read_rounds(output, puts, log)
    if records is None:
        return None
    columns = {key: [[getattr(item, key)] for item in records] for key in _PER_ROW}
    columns |= {key: [getattr(item, key) for item in records] for key in _PER_ROUND}
    if any(value is None for (value,) in columns["overlap"]):
        columns["overlap"] = None
    return columns


# A pass of a given width, timed by the caller, that leaves the model's cache as it was.
Step = Callable[[int], None]


class BatchForwards:
    """Times bare passes of target and draft on one batch and engine.

    Args:
        pair: with its draft.
        prompts: the batch, of one length.
        settings: for the number of new tokens: passes run where decoding is half-way.
        engine: a key of `STEPS`.
        widths: of the target's passes.
    """

    def __init__(
        self, pair: LoadedPair, prompts: Sequence[Prompt], settings: Settings, engine: str, widths: Sequence[int]
    ) -> None:
        self.pair, self.widths, self.engine = pair, widths, engine
        self.rows = [prompt.token_ids for prompt in prompts]
        self.behind = max(1, settings.max_new_tokens // 2)
        with pass_mode(*pair.models)():
            self.target, self.draft = self._build(pair.target), self._build(pair.draft)
            self._sample()  # the first pass of a shape allocates, or compiles

    def sample(self) -> dict[str, Any]:
        """Each target pass follows its draft steps: {"draft": {"1": seconds}, "target": {width: seconds}}.

        In the order of decoding, since a model that was just run finds its weights in the processor's cache; seconds
        are lists.
        """
        with pass_mode(*self.pair.models)():
            return self._sample()

    def _sample(self) -> dict[str, Any]:
        times: dict[str, Any] = {"draft": {"1": []}, "target": {}}
        for width in self.widths:
            times["draft"]["1"] += [self._timed(self.draft, 1) for _ in range(width - 1)]
            times["target"][str(width)] = [self._timed(self.target, width)]
        return times

    def _timed(self, step: Step, width: int) -> float:
        synchronize(self.pair)
        start = time.perf_counter()
        step(width)
        synchronize(self.pair)
        return time.perf_counter() - start

    def _build(self, model: Any) -> Step:
        return STEPS[self.engine](self.pair, model, self.rows, self.behind, max(self.widths))


def static_step(pair: LoadedPair, model: Any, rows: Sequence[Sequence[int]], behind: int, widest: int) -> Step:
    """As `raw_forwards.build_step`, in a per-row static cache; the same where the model can't be fed from one."""
    if not keeps_rows(model, {}):
        return build_step(pair, model, rows, behind, widest)
    text = text_behind(model, rows, behind + widest)
    filled = text.shape[1] - widest
    cache = RowsCache(model.config, text.shape[1])
    runner = StaticRunner(model, {"past_key_values": cache}, text)
    runner.forward(text[:, :filled], 1)
    slots = torch.arange(filled, text.shape[1], device=text.device).expand(len(text), -1)

    def step(width: int) -> None:
        tokens, written = text[:, filled : filled + width], slots[:, :width]
        static_pass(
            model, cache, tokens, written, runner.positions, runner.visible, runner.windows,
            span=filled + width, count=None,
        )  # fmt: skip

    return step


# How bare passes run on each engine.
STEPS: Mapping[str, Callable[[LoadedPair, Any, Sequence[Sequence[int]], int, int], Step]] = {
    "eager": build_step,
    "static": static_step,
}
