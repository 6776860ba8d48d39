"""Keys of plans: calls may share an engine if their keys are equal."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from hf_specdec.host.suppressed_tokens import what_is_fixed
from hf_specdec.lengths.stop_rules import FirstOf, StopRule
from hf_specdec.prepared.round_steps import Plan


def parts_of(rule: StopRule) -> tuple[StopRule, ...]:
    """The parts of a combined stop rule; a simple rule is its only part."""
    return rule.rules if type(rule) is FirstOf else (rule,)


def plan_key(plan: Plan) -> Hashable:
    """A key that is equal for two plans exactly if their steps compute the same."""
    numbers = [(type(rule), _exact(vars(rule))) for rule in parts_of(plan.stop)]
    numbers += [(type(processor), _exact(what_is_fixed(processor))) for processor in plan.processors]
    relaxed = None if plan.relaxation is None else (type(plan.relaxation), _exact(vars(plan.relaxation)))
    sizes = (plan.lookahead, plan.vocabulary, plan.draft_vocabulary, plan.eos_tokens)
    return (sizes, plan.do_sample, plan.keep_probs, plan.rule, relaxed, tuple(numbers))


def _exact(value: object) -> Hashable:
    """An exactly comparable form of a value: the `repr` of a tensor shows only four digits of each number."""
    if isinstance(value, Tensor):
        return (value.dtype, str(value.device), tuple(value.shape), _exact(value.tolist()))
    if isinstance(value, dict):
        return tuple((name, _exact(part)) for name, part in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_exact, value))
    return (type(value).__name__, value.hex() if isinstance(value, float) else repr(value))
