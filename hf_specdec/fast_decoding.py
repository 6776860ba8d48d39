"""Rounds without Python in them: two prepared steps over static buffers, and one copy to the host.

The loop is `decoding.Decoder`'s; only how a round runs is another. What the steps can't do (processors that read the
text, recorded scores, other drafters, a cache of the caller's own) keeps the general round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import logits_process as host

from hf_specdec import captured
from hf_specdec.decoding import Decoder
from hf_specdec.draft_length import EntropyStop, Fallback, FirstOf, StopRule
from hf_specdec.drafting import ModelDrafter, NoDrafter
from hf_specdec.processors import PREFIX_FREE, BildRollback
from hf_specdec.round_steps import Plan, Side, draft_step, verify_step
from hf_specdec.static_runner import StaticRunner
from hf_specdec.stats import Round, reached_overlap
from hf_specdec.transcript import Transcript

LEAST_CAPACITY_STEP = 128  # see `fast_capacity`
KEPT_ENGINES = 4  # of a target; each holds its caches
# They read scores alone and are told apart by their numbers; the one left out holds a list of tokens.
PROCESSORS = tuple(kind for kind in PREFIX_FREE if kind is not host.SuppressTokensLogitsProcessor)

# They stop by a round's own draft probabilities, or at their limit.
FIXED_RULES = (StopRule, Fallback, EntropyStop)

Drafted = tuple[Tensor, Tensor, Tensor | None]


class Engine:
    """Static buffers of a pair and the prepared steps over them; serves one call at a time.

    Args:
        plan: how rounds run; kept as an attribute, and `compile`, too.
        target, draft: the models' runners, before their first pass, whose caches it keeps; no draft: plain decoding.
        compile: compile the steps.

    Attributes:
        run_draft, run_verify: the prepared `draft_step` and `verify_step`.
        state, uniforms: what they read, see there.
        tails: the rows' last two tokens.
    """

    def __init__(self, plan: Plan, target: StaticRunner, draft: StaticRunner | None, compile: bool) -> None:
        self.plan = plan
        self.compile = compile
        self.target = _side(target)
        self.draft = None if draft is None else _side(draft)
        device, rows = target.positions.device, len(target.read)
        self.state = torch.zeros(rows, 4, dtype=torch.long, device=device)
        self.state[:, 2] = 2
        self.uniforms = torch.zeros(rows, 2 * plan.lookahead + 1, device=device)
        self.tails: list[list[int]] = []
        self._no_drafts = (self.state[:, :0], self.state[:, 3], None)
        # Once as they are, so that the caches exist before anything is compiled or captured.
        self._verify(self._draft())
        self.run_verify: Callable[[Drafted], Tensor] = captured.prepared(self._verify, device, compile=compile)
        self.run_draft: Callable[[], Drafted] = self._draft
        if draft is not None:
            self.run_draft = captured.prepared(self._draft, device, compile=compile)

    def adopt(self, target: StaticRunner, draft: StaticRunner | None) -> None:
        """Let a call's runners read into the engine's buffers."""
        for side, runner in ((self.target, target), (self.draft, draft)):
            if side is not None and runner is not None:
                side.positions.copy_(_bounded_positions(runner))
                side.visible.copy_(runner.visible)
                runner.cache, runner.positions, runner.visible = side.cache, side.positions, side.visible

    def _draft(self) -> Drafted:
        if self.draft is None:
            return self._no_drafts
        return draft_step(self.draft, self.plan, self.state, self.uniforms)

    def _verify(self, drafted: Drafted) -> Tensor:
        return verify_step(self.target, self.plan, self.state, *drafted, self.uniforms[:, self.plan.lookahead :])


@dataclass(frozen=True)
class FastDecoder(Decoder):
    """`Decoder` with an engine's rounds; the runners of target and drafter only read the prompt, eagerly."""

    engine: Engine

    def _round(self, transcript: Transcript) -> Round:
        began = perf_counter()
        engine, plan = self.engine, self.engine.plan
        first = transcript.lengths[0] == transcript.prompt_length
        if first:
            engine.tails = transcript.sequences[:, -2:].tolist()
        self._load_state(transcript)
        if first and isinstance(self.drafter, ModelDrafter):
            known = transcript.sequences[:, :-2].clamp(max=plan.draft_vocabulary - 1)
            _read_prompt(self.drafter.runner, known)
        with _ordinary_tensors():
            drafts = engine.run_draft()
        drafted = perf_counter()
        if first:
            _read_prompt(self.target, transcript.sequences[:, :-1])
        with _ordinary_tensors():
            result = engine.run_verify(drafts).tolist()
        checked = perf_counter()
        decided = plan.lookahead + 3
        rows = [[int(n) for n in row[:decided]] for row in result]
        new_tokens = [[*row[: row[-2]], row[-1]] for row in rows]
        kept = transcript.append(new_tokens)
        engine.tails = [(t + new[:n])[-2:] for t, new, n in zip(engine.tails, new_tokens, kept, strict=True)]
        return Round(
            drafted=tuple(row[-3] for row in rows),
            accepted=tuple(row[-2] for row in rows),
            new_tokens=kept,
            overlap=tuple(
                reached_overlap(row[decided:], accepted, drafted)
                for row, (*_, drafted, accepted, _) in zip(result, rows, strict=True)
            ),
            draft_steps=plan.lookahead,
            width=plan.lookahead + (transcript.prompt_length if first else 1),
            draft_seconds=drafted - began,
            verify_seconds=checked - drafted,
            seconds=perf_counter() - began,
        )

    def _load_state(self, transcript: Transcript) -> None:
        """One copy to the device: last tokens, lengths, limits; and the round's uniform numbers."""
        engine, lookahead = self.engine, self.engine.plan.lookahead
        rows = zip(engine.tails, transcript.lengths, transcript.room, strict=True)
        state = [[tail[0], tail[-1], n, max(min(space - 1, lookahead), 0)] for tail, n, space in rows]
        engine.state.copy_(torch.tensor(state))
        if engine.plan.do_sample:
            torch.rand(engine.uniforms.shape, out=engine.uniforms)


class Engines:
    """A target's engines, the last used last; they go with the model, and copies of it start without."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Engine] = OrderedDict()

    def __deepcopy__(self, memo: object) -> Engines:
        return Engines()

    def __reduce__(self) -> tuple[type[Engines], tuple[()]]:
        return Engines, ()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._kept.values())

    def take(self, key: Hashable) -> Engine | None:
        """An engine for one call; nobody else gets it until it is put back."""
        return self._kept.pop(key, None)

    def put(self, key: Hashable, engine: Engine) -> None:
        """Keep an engine for later calls; the least used of too many goes."""
        self._kept[key] = engine
        while len(self._kept) > KEPT_ENGINES:
            self._kept.popitem(last=False)


def kept_engines(model: PreTrainedModel, *, compile: bool) -> list[Engine]:
    """The engines that a target keeps for calls with or without `compile`, whose steps can be timed by themselves."""
    return [engine for engine in model.__dict__.get("_speculation_engines", ()) if engine.compile == compile]


def fast_capacity(tokens: int) -> int:
    """Slots of the caches of calls that reach this many tokens: calls of similar length share their steps.

    Attention looks at all of them, so that of more than 512 tokens at most a quarter is added.
    """
    step = max(LEAST_CAPACITY_STEP, (1 << (tokens.bit_length() - 1)) // 4)
    return -(-tokens // step) * step


@contextmanager
def accelerated(decoder: Decoder, transcript: Transcript, *, compile: bool) -> Iterator[Decoder]:
    """The decoder with prepared rounds where they can be had (see `plan_for`), or as it is.

    Args:
        compile: compile the steps; on CUDA they are captured in any case.
    """
    plan = plan_for(decoder, transcript)
    if plan is None or not (compile or captured.captures(transcript.ids.device)):
        yield decoder
        return
    target = decoder.target
    draft = decoder.drafter.runner if isinstance(decoder.drafter, ModelDrafter) else None
    assert isinstance(target, StaticRunner) and (draft is None or isinstance(draft, StaticRunner))
    engines: Engines = target.model.__dict__.setdefault("_speculation_engines", Engines())
    key = (compile, len(target.read), target.cache.capacity, _plan_key(plan), _state_of(target), _state_of(draft))
    with _ordinary_tensors():
        engine = engines.take(key) or Engine(plan, target, draft, compile)
        engine.adopt(target, draft)
    fields = {name: getattr(decoder, name) for name in Decoder.__dataclass_fields__} | {"mode": torch.no_grad}
    try:
        yield FastDecoder(**fields, engine=engine)
    finally:
        engines.put(key, engine)


def plan_for(decoder: Decoder, transcript: Transcript) -> Plan | None:
    """How an engine would run this call; None where it can't, and the general round has to."""
    target, drafter = decoder.target, decoder.drafter
    processors = decoder.processors.processors
    if (
        not isinstance(target, StaticRunner)
        or target.cache.grows
        or transcript.records
        or not all(type(processor) in PROCESSORS for processor in processors)
        or not (decoder.relaxation is None or type(decoder.relaxation) is BildRollback)
        or not _has_fixed_rope(target.model)
    ):
        return None
    common: dict[str, Any] = {
        "do_sample": decoder.do_sample,
        "processors": tuple(processors),
        "relaxation": decoder.relaxation,
        "rule": decoder.rule,
        "eos_tokens": tuple(sorted(transcript.eos_tokens)),
    }
    if type(drafter) is NoDrafter:
        return Plan(0, 0, 0, keep_probs=False, stop=StopRule(0), **common)
    if (
        type(drafter) is not ModelDrafter
        or not isinstance(drafter.runner, StaticRunner)
        or not all(type(rule) in FIXED_RULES for rule in _parts(drafter.rule))
        or drafter.runner.positions.device != transcript.ids.device
        or (drafter.max_positions is not None and drafter.max_positions < transcript.max_length)
        or transcript.prompt_length < 2
        or not _has_fixed_rope(drafter.runner.model)
    ):
        return None
    return Plan(
        drafter.rule.limit,
        drafter.vocabulary,
        drafter.draft_vocabulary,
        keep_probs=drafter.keep_probs,
        stop=drafter.rule,
        **common,
    )


def _parts(rule: StopRule) -> tuple[StopRule, ...]:
    return rule.rules if type(rule) is FirstOf else (rule,)


def _has_fixed_rope(model: PreTrainedModel) -> bool:
    """Whether rotary frequencies are the same at every length; otherwise they are chosen by reading numbers."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return not any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """No gradients, but tensors that calls within and without the caller's `inference_mode` can write to."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _read_prompt(runner: Any, tokens: Tensor) -> None:
    if tokens.shape[1] > 0:
        runner.forward(tokens, 1)


def _side(runner: StaticRunner) -> Side:
    positions, visible = _bounded_positions(runner).clone(), runner.visible.clone()
    return Side(runner.model, runner.cache, positions, visible, runner.keeps_logits)


def _bounded_positions(runner: StaticRunner) -> Tensor:
    """Positions within the model's tables; those beyond belong to drafts past a text's end, which are dropped."""
    bound = getattr(runner.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return runner.positions if bound is None else runner.positions.clamp(max=bound - 1)


def _plan_key(plan: Plan) -> Hashable:
    """What makes two calls' steps the same code."""
    numbers = [(type(p).__name__, repr(sorted(vars(p).items()))) for p in (*_parts(plan.stop), *plan.processors)]
    rollback = plan.relaxation
    relaxed = (rollback.threshold, rollback.greedy) if isinstance(rollback, BildRollback) else None
    sizes = (plan.lookahead, plan.vocabulary, plan.draft_vocabulary, plan.eos_tokens)
    return (sizes, plan.do_sample, plan.keep_probs, plan.rule, relaxed, tuple(numbers))


def _state_of(runner: StaticRunner | None) -> Hashable:
    """What compiled code of a model depends on: its very weights, modules, hooks and attention."""
    if runner is None:
        return None
    model = runner.model
    # Weights of a tensor class of their own (quantized ones) may have no address to ask for.
    weights = tuple((id(p), p.data_ptr() if type(p) is torch.nn.Parameter else 0, p.dtype) for p in model.parameters())
    modules = tuple((id(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules())
    config = model.config.get_text_config(decoder=True)
    return (id(model), str(model.device), model.training, config._attn_implementation, hash(weights), hash(modules))
