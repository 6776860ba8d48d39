"""What tells prepared steps apart: calls that agree in it share their compiled code or graphs."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from hf_specdec.draft_length import FirstOf, StopRule
from hf_specdec.processors import BildRollback
from hf_specdec.round_steps import Plan
from hf_specdec.static_runner import StaticRunner

# By these names PEFT's layers say which adapter is at work.
_ADAPTERS = ("_active_adapter", "_disable_adapters")


def parts_of(rule: StopRule) -> tuple[StopRule, ...]:
    """The rules that a stop rule is made of."""
    return rule.rules if type(rule) is FirstOf else (rule,)


def plan_key(plan: Plan) -> Hashable:
    """What makes two calls' steps the same code."""
    numbers = [(type(p).__name__, repr(sorted(vars(p).items()))) for p in (*parts_of(plan.stop), *plan.processors)]
    rollback = plan.relaxation
    relaxed = (rollback.threshold, rollback.greedy) if isinstance(rollback, BildRollback) else None
    sizes = (plan.lookahead, plan.vocabulary, plan.draft_vocabulary, plan.eos_tokens)
    return (sizes, plan.do_sample, plan.keep_probs, plan.rule, relaxed, tuple(numbers))


def state_of(runner: StaticRunner | None) -> Hashable:
    """What compiled code of a model depends on: its very weights, modules, hooks, adapters, attention, autocast.

    Other attributes of modules, should any be changed between calls, are not noticed.
    """
    if runner is None:
        return None
    model = runner.model
    # Weights of a tensor class of their own (quantized ones) may have no address to ask for.
    weights = tuple((id(p), p.data_ptr() if type(p) is torch.nn.Parameter else 0, p.dtype) for p in model.parameters())
    modules = tuple(
        (id(m), len(m._forward_hooks), len(m._forward_pre_hooks), *(str(vars(m).get(name)) for name in _ADAPTERS))
        for m in model.modules()
    )
    config = model.config.get_text_config(decoder=True)
    cast = torch.is_autocast_enabled(model.device.type) and torch.get_autocast_dtype(model.device.type)
    state = (str(model.device), model.training, config._attn_implementation, cast)
    return (id(model), *state, hash(weights), hash(modules))
