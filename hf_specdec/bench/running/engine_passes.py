"""Bare passes of a batch on each engine: what its decoding could cost at best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.bare_passes import build_step, text_behind
from hf_specdec.bench.running.timed_call import synchronize
from hf_specdec.bench.settings import Settings
from hf_specdec.models.static_cache import RowsCache
from hf_specdec.models.static_runner import StaticRunner, static_pass, supports_recorded_row, supports_rows_cache
from hf_specdec.models.traits import pass_mode
from hf_specdec.prepared import engine as prepared_engine
from hf_specdec.prepared.engine import kept_engines

Times = dict[str, dict[str, list[float]]]
Place = tuple[str, int, int]  # engine, batch size, prompt length

RECORDED = "recorded"  # how the eager engine's narrow passes run on a CPU, after some

_PREPARED_SAMPLES = 3
_WARM_UP = 3


class Forwards:
    """Times bare passes between runs, so that they meet the same state of the machine.

    Args:
        pair: with its draft.
        settings: for the number of new tokens: passes run where decoding is half-way.
        widths: of the target's passes where any can be had.
    """

    def __init__(self, pair: LoadedPair, settings: Settings, widths: Sequence[int]) -> None:
        self.pair, self.settings, self.widths = pair, settings, widths
        self._steps: dict[Place, BatchForwards] = {}

    def sample(self, engine: str, prompts: Sequence[Prompt]) -> Times | None:
        """{"draft": {steps in a row: seconds a step}, "target": {width: seconds}}, seconds in lists; None: no passes.

        Compiled and captured engines are timed by the very steps that the calls before have left. These choose and
        judge tokens, too, which can't be parted from their passes.
        """
        times = prepared_times(self.pair, engine == "compiled", len(prompts)) if engine != "eager" else None
        if times is not None or engine not in STEPS or (engine == RECORDED and not records(self.pair)):
            return times
        place = (engine, len(prompts), len(prompts[0].token_ids))
        if place not in self._steps:
            self._steps[place] = BatchForwards(self.pair, prompts, self.settings, engine, self.widths)
        return self._steps[place].sample()


def prepared_times(pair: LoadedPair, compile: bool, rows: int) -> Times | None:
    """Of the prepared steps that serve so many rows, in the order of a round; None where there are none."""
    times: Times = {"draft": {}, "target": {}}
    for engine in kept_engines(pair.target, compile=compile):
        if len(engine.state) != rows:
            continue
        for lookahead, steps in engine.steps.items():
            drafting, *longer = engine.lengths(lookahead)
            with torch.no_grad():
                for _ in range(_PREPARED_SAMPLES):
                    (drafts, _), seconds = timed(pair, engine.steps[drafting].run_draft)
                    if longer:
                        drafts, _ = steps.run_draft()  # blanks, as wide as these steps judge
                    elif lookahead:
                        times["draft"].setdefault(str(lookahead), []).append(seconds / lookahead)
                    _, seconds = timed(pair, partial(steps.run_verify, drafts))
                    times["target"].setdefault(str(lookahead + 1), []).append(seconds)
    return times if times["target"] else None


@contextmanager
def keeping_engines(count: int) -> Iterator[None]:
    """Lets a target keep so many engines: contestants that take turns would compile again and again otherwise."""
    saved = prepared_engine.KEPT_ENGINES
    prepared_engine.KEPT_ENGINES = max(saved, count)
    try:
        yield
    finally:
        prepared_engine.KEPT_ENGINES = saved


def timed(pair: LoadedPair, step: Callable[[], Any]) -> tuple[Any, float]:
    """What a step returns, and the seconds that it took."""
    synchronize(pair)
    start = time.perf_counter()
    result = step()
    synchronize(pair)
    return result, time.perf_counter() - start


# A pass of a given width, timed by the caller, that leaves the model's cache as it was.
Step = Callable[[int], None]


class BatchForwards:
    """Times bare passes of target and draft on one batch and engine, neither compiled nor captured.

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
            for _ in range(_WARM_UP):
                self._sample()  # the first passes of a shape allocate, and are compared with their recording

    def sample(self) -> Times:
        """Each target pass follows its draft steps: {"draft": {"1": seconds}, "target": {width: seconds}}.

        In the order of decoding, since a model that was just run finds its weights in the processor's cache; seconds
        are lists.
        """
        with pass_mode(*self.pair.models)():
            return self._sample()

    def _sample(self) -> Times:
        times: Times = {"draft": {"1": []}, "target": {}}
        for width in self.widths:
            times["draft"]["1"] += [self._timed(self.draft, 1) for _ in range(width - 1)]
            times["target"][str(width)] = [self._timed(self.target, width)]
        return times

    def _timed(self, step: Step, width: int) -> float:
        return timed(self.pair, lambda: step(width))[1]

    def _build(self, model: Any) -> Step:
        return STEPS[self.engine](self.pair, model, self.rows, self.behind, max(self.widths))


def static_step(pair: LoadedPair, model: Any, rows: Sequence[Sequence[int]], behind: int, widest: int) -> Step:
    """As `raw_forwards.build_step`, in a per-row static cache; the same where the model can't be fed from one."""
    if not supports_rows_cache(model, {}):
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


def recorded_step(pair: LoadedPair, model: Any, rows: Sequence[Sequence[int]], behind: int, widest: int) -> Step:
    """As `static_step`, by the runner that records its passes; which shapes the runs before have used is known."""
    text = text_behind(model, rows, behind + widest)
    filled = text.shape[1] - widest
    runner = StaticRunner(model, {"past_key_values": RowsCache(model.config, text.shape[1])}, text)
    runner.forward(text[:, :filled], 1)

    def step(width: int) -> None:
        runner.forward(text[:, filled : filled + width], width)
        runner.rewind([filled] * len(text))

    return step


def records(pair: LoadedPair) -> bool:
    """Whether passes of both models are recorded by default."""
    return all(supports_recorded_row(model, {}) for model in pair.models)


# How bare passes run on each engine.
STEPS: Mapping[str, Callable[[LoadedPair, Any, Sequence[Sequence[int]], int, int], Step]] = {
    "eager": build_step,
    "static": static_step,
    RECORDED: recorded_step,
}
