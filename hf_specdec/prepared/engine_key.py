"""Which calls may share an engine: those whose plans have equal keys."""

from __future__ import annotations

from collections.abc import Hashable

from hf_specdec.host.processors import BildRollback
from hf_specdec.lengths.stop_rules import FirstOf, StopRule
from hf_specdec.prepared.round_steps import Plan


def parts_of(rule: StopRule) -> tuple[StopRule, ...]:
    """The parts of a combined stop rule; a simple one is its own only part."""
    return rule.rules if type(rule) is FirstOf else (rule,)


def plan_key(plan: Plan) -> Hashable:
    """A key that two plans share exactly if their steps compute the same."""
    numbers = [(type(p).__name__, repr(sorted(vars(p).items()))) for p in (*parts_of(plan.stop), *plan.processors)]
    rollback = plan.relaxation
    relaxed = (rollback.threshold, rollback.greedy) if isinstance(rollback, BildRollback) else None
    sizes = (plan.lookahead, plan.vocabulary, plan.draft_vocabulary, plan.eos_tokens)
    return (sizes, plan.do_sample, plan.keep_probs, plan.rule, relaxed, tuple(numbers))
