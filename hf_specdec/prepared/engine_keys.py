"""What tells prepared steps apart: calls that agree in it share their compiled code or graphs."""

from __future__ import annotations

from collections.abc import Hashable

from hf_specdec.host.processors import BildRollback
from hf_specdec.lengths.stop_rules import FirstOf, StopRule
from hf_specdec.prepared.steps import Plan


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
