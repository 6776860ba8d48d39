"""Times of bare forward passes on each engine, at the shapes of a run: a lower bound of its decoding time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.bench.inputs.prompts import Prompt, context_length
from hf_specdec.bench.inputs.recordings import model_inputs
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.methods import GENERATE, Contender
from hf_specdec.bench.running.timed_call import synchronize
from hf_specdec.models.cache_choice import static_cache, supports_recorded_row, supports_rows_cache
from hf_specdec.models.cache_names import CACHE_NAME, cache_argument, cache_of
from hf_specdec.models.cache_rollback import has_recurrent_layers, new_cache
from hf_specdec.models.onednn_linears import onednn_linears
from hf_specdec.models.recorded_passes import recorded_passes, without_recordings
from hf_specdec.models.recurrent_runner import RecurrentRunner
from hf_specdec.models.static_cache import CacheSize
from hf_specdec.models.static_runner import StaticRunner
from hf_specdec.models.traits import pass_mode, text_prefix
from hf_specdec.prepared import engine_store
from hf_specdec.prepared.engine import Engine, prepared_capacity
from hf_specdec.prepared.engine_store import kept_engines
from hf_specdec.prepared.pass_kernels import pass_kernels

# ("draft", draft steps in a row, seconds a step) and ("target", tokens of a pass, seconds)
Times = list[tuple[str, int, float]]
# A pass over a given number of tokens on a filled cache, which it leaves unchanged.
Step = Callable[[int], None]

# Uncounted rounds over all widths: the first passes allocate, are recorded, or check a recording.
_WARM_UP, _WARM_UP_RECORDING = 3, 12
# Widths of the target's passes that are timed, up to the longest draft; those between are interpolated.
_WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17)
# llama.cpp's passes cannot be timed apart from its decoding.
_ENGINES = (GENERATE, "eager", "recorded", "static", "compiled")
_STEPS = 4  # most draft steps to time before each verification; more would not change the median
_PREPARED_SAMPLES = 3


class BarePasses:
    """Times bare passes between calls, so that both find the machine in the same state.

    Args:
        pair: the models to time; without a draft only the target.
        new_tokens: new tokens of a call; the cache holds half of them after the prompt, as half-way through decoding.
        widths: widths of the target's passes, including 1.
    """

    def __init__(self, pair: LoadedPair, new_tokens: int, widths: Sequence[int]) -> None:
        self.pair, self.new_tokens, self.widths = pair, new_tokens, sorted(widths)
        self.half = max(1, new_tokens // 2)
        self._steps: dict[tuple[str, int, int], dict[str, Step]] = {}

    def sample(self, engine: str, prompts: Sequence[Prompt]) -> Times:
        """Time each target pass after the draft steps that precede it in decoding; empty if the engine has no passes.

        The order matters, since a model that has just run finds its weights in the processor's cache. Compiled and
        captured passes are the steps that the calls before have left. They also choose and judge tokens, which cannot
        be separated from their passes. An encoder-decoder whose steps are not compiled uses the compiled kernels.
        """
        if engine not in _ENGINES:
            return []
        if engine in ("static", "compiled"):
            prepared = _prepared_times(self.pair, self._engines(engine == "compiled", prompts))
            if prepared or (engine == "compiled" and not self.pair.encoder_decoder):
                return prepared
        length = min(len(prompt.token_ids) for prompt in prompts)
        cut = [replace(prompt, token_ids=prompt.token_ids[-length:]) for prompt in prompts]
        eagerly = without_recordings() if engine == "eager" else nullcontext()
        with eagerly, pass_mode(*self.pair.models)():  # as our passes run
            place = engine, len(cut), length
            if place not in self._steps:
                build = generate_step if engine == GENERATE else partial(our_step, engine=engine)
                roles = {"target": self.pair.target} | ({} if self.pair.draft is None else {"draft": self.pair.draft})
                self._steps[place] = {
                    role: build(self.pair, model, cut, self.half, self.widths[-1]) for role, model in roles.items()
                }
                known = [recorded_passes(model) for model in self.pair.models]
                recorded = all(passes is None or passes.made for passes in known)
                for _ in range(_WARM_UP if recorded or engine == GENERATE else _WARM_UP_RECORDING):
                    self._round_of_each_width(self._steps[place])
            return self._round_of_each_width(self._steps[place])

    def _engines(self, compile: bool, prompts: Sequence[Prompt]) -> list[Engine]:
        """The engines that served these prompts; those for other lengths of text read caches of other sizes."""
        longest = max(len(prompt.token_ids) for prompt in prompts) + self.new_tokens
        models = self.pair.models if compile else []
        sizes = {prepared_capacity(longest + spare, *models) for spare in (1, self.widths[-1] + 1)}
        return [
            engine
            for engine in kept_engines(self.pair.target, compile=compile)
            if len(engine.state) == len(prompts)
            and engine.target.cache.capacity in sizes
            and (engine.draft is None or engine.draft.held() is self.pair.draft)
        ]

    def _round_of_each_width(self, steps: Mapping[str, Step]) -> Times:
        times: Times = []
        for width in self.widths:
            if "draft" in steps:
                drafting = partial(steps["draft"], 1)
                times += [("draft", 1, timed(self.pair, drafting)[1]) for _ in range(min(width - 1, _STEPS))]
            times.append(("target", width, timed(self.pair, partial(steps["target"], width))[1]))
        return times


def widths_for(contenders: Sequence[Contender]) -> list[int]:
    """The widths at which the target's passes are timed for these contenders, in tokens."""
    widest = max(one.longest for one in contenders) + 1
    lookaheads = (one.method.lookahead for one in contenders)
    fixed = {tokens + 1 for tokens in lookaheads if isinstance(tokens, int)}
    return sorted({1, widest, *fixed, *(width for width in _WIDTHS if width <= widest)})


def generate_step(pair: LoadedPair, model: PreTrainedModel, prompts: Sequence[Prompt], after: int, widest: int) -> Step:
    """Return a step that passes as transformers' loops do: calls of the model with a dynamic cache.

    Args:
        pair: its context length limits the text in the cache.
        model: target or draft.
        prompts: of one length.
        after: tokens in the cache after the prompt (for an encoder-decoder: in the decoder's cache).
        widest: the largest number of tokens in one pass.
    """
    return _on_dynamic_cache(model, *_context(pair, model, prompts, after, widest))


def _on_dynamic_cache(model: PreTrainedModel, filled: Tensor, drafted: Tensor, fixed: Mapping[str, Any]) -> Step:
    """Return a step over the first of `drafted` with a dynamic cache; arguments as `_context` returns them."""
    key, argument = f"{text_prefix(model)}input_ids", cache_argument(model)
    cache = cache_of(model(**{key: filled}, **fixed, use_cache=True))
    cache.activate_past_recording()

    def step(width: int) -> None:
        model(**{key: drafted[:, :width], argument: cache}, **fixed, use_cache=True)
        cache.crop(-width)

    return step


def our_step(
    pair: LoadedPair,
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    after: int,
    widest: int,
    *,
    engine: str = "recorded",
) -> Step:
    """Return a step that passes as this package's loop does.

    Its passes are recorded after some calls.

    Args:
        engine: "static" uses a static cache if the model supports one; "compiled" the kernels of compiled steps.
    """
    prompt, drafted, fixed = _context(pair, model, prompts, after, widest)
    recurrent, filled = has_recurrent_layers(model), prompt.shape[1]
    serves = supports_rows_cache if engine == "static" or len(prompts) > 1 else supports_recorded_row
    kernels = pass_kernels if engine == "compiled" else onednn_linears
    runner: StaticRunner | RecurrentRunner
    if recurrent:
        cache = new_cache(model, "model", cross_attention=False)
        runner = RecurrentRunner(model, {cache_argument(model): cache, "use_cache": True}, prompt, filled + widest)
    elif serves(model, fixed):
        room = static_cache(model, fixed, CacheSize(filled + widest), "model")
        runner = StaticRunner(model, {**fixed, CACHE_NAME: room}, (prompt.shape[0], filled), kernels)
    else:
        bare, in_kernels = _on_dynamic_cache(model, prompt, drafted, fixed), kernels(model)

        def with_kernels(width: int) -> None:
            with in_kernels():
                bare(width)

        return with_kernels
    runner.forward(prompt, 1)

    def step(width: int) -> None:
        runner.rewind([filled] * len(prompts))
        runner.forward(drafted[:, :width], width)

    return step


@contextmanager
def keeping_engines(count: int, device: torch.device) -> Iterator[None]:
    """Let a target keep this many engines, on a GPU in up to half of its memory.

    Otherwise, methods that take turns would prepare their steps again in each call.
    """
    saved = engine_store.KEPT_ENGINES, engine_store.KEPT_BYTES
    room = torch.cuda.get_device_properties(device).total_memory // 2 if device.type == "cuda" else 0
    engine_store.KEPT_ENGINES, engine_store.KEPT_BYTES = max(saved[0], count), max(saved[1], room)
    try:
        yield
    finally:
        engine_store.KEPT_ENGINES, engine_store.KEPT_BYTES = saved


def _prepared_times(pair: LoadedPair, engines: Sequence[Engine]) -> Times:
    """Time the prepared steps of engines, in the order of a round."""
    times: Times = []
    for engine in engines:
        for lookahead, steps in engine.steps.items():
            drafting, *longer = engine.lengths(lookahead)
            with engine.buffers.in_use(), torch.no_grad():
                for _ in range(_PREPARED_SAMPLES):
                    drafts, seconds = timed(pair, engine.steps[drafting].run_draft)
                    if longer:
                        drafts = steps.run_draft()  # blanks, as wide as these steps judge
                    elif lookahead:
                        times.append(("draft", lookahead, seconds / lookahead))
                    _, seconds = timed(pair, partial(steps.run_verify, drafts))
                    times.append(("target", lookahead + 1, seconds))
    return times


def timed(pair: LoadedPair, step: Callable[[], Any]) -> tuple[Any, float]:
    """Run a step; return its result and its duration in seconds."""
    synchronize(pair)
    start = time.perf_counter()
    result = step()
    synchronize(pair)
    return result, time.perf_counter() - start


def _context(
    pair: LoadedPair, model: PreTrainedModel, prompts: Sequence[Prompt], after: int, widest: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The tokens before the timed passes `[B, N]`, those of the passes `[B, widest]`, and an encoder's arguments."""
    text, fixed = _text(model, prompts, after + widest), dict[str, Any]()
    if model.config.is_encoder_decoder:
        read = model_inputs(pair, prompts, model)
        fixed = {"encoder_outputs": model.get_encoder()(**read), "attention_mask": read.get("attention_mask")}
        text = text[:, len(prompts[0].token_ids) :]
    room = context_length(pair)
    filled = text.shape[1] - widest if room is None else min(text.shape[1], room) - widest
    return text[:, :filled], text[:, filled : filled + widest], fixed


def _text(model: PreTrainedModel, prompts: Sequence[Prompt], more: int) -> Tensor:
    """Prompts of one length, followed by their own repetition: `[B, P + more]`."""
    rows = [prompt.token_ids for prompt in prompts]
    prompt = torch.tensor(rows, device=model.device) % model.config.get_text_config().vocab_size
    length = prompt.shape[1]
    return prompt.repeat(1, 2 + more // length)[:, : length + more]
