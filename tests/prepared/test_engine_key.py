"""Calls share an engine exactly if their steps compute the same."""

from dataclasses import replace

import pytest
from transformers import EtaLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

from hf_specdec.host.relaxations import BildRollback, Ensemble, LenientArgmax, TypicalAcceptance
from hf_specdec.lengths.stop_rules import EntropyStop, StopRule
from hf_specdec.prepared.engine_key import plan_key
from hf_specdec.prepared.round_steps import Plan
from hf_specdec.rules.verification import SAMPLING_RULES, Lenient


def _key(*processors, stop: StopRule | None = None):
    rule = SAMPLING_RULES["token"]
    return plan_key(Plan(4, 7, 7, True, True, stop or StopRule(0), processors, None, rule, (2,)))


@pytest.mark.parametrize(("one", "other"), [
    (EtaLogitsWarper(3.0e-4), EtaLogitsWarper(3.4e-4)),  # a tensor, whose repr rounds both alike
    (TemperatureLogitsWarper(0.7), TemperatureLogitsWarper(0.7000000001)),
    (TopPLogitsWarper(0.9), TopPLogitsWarper(0.9, min_tokens_to_keep=2)),
], ids=lambda processor: type(processor).__name__)  # fmt: skip
def test_processors_of_other_numbers_get_other_steps(one, other) -> None:
    assert _key(one) != _key(other) and _key(one) == _key(type(one)(**_arguments(one)))
    assert {_key(one): 1}


def test_relaxations_and_lenience_count() -> None:
    base = Plan(4, 7, 7, True, True, StopRule(0), (), None, SAMPLING_RULES["token"], (2,))
    relaxations = (
        None,
        BildRollback(1.0, greedy=True),
        BildRollback(1.0, greedy=False),
        BildRollback(2.0, greedy=True),
    )
    relaxations += (LenientArgmax(0.5), TypicalAcceptance(0.5), TypicalAcceptance(0.4), Ensemble(0.5))
    rules = (*SAMPLING_RULES.values(), *(Lenient(rule, n) for rule in SAMPLING_RULES.values() for n in (0.5, 0.4)))
    plans = [replace(base, relaxation=one) for one in relaxations] + [replace(base, rule=rule) for rule in rules[1:]]
    assert len({plan_key(plan) for plan in plans}) == len(plans)
    for made in (lambda: replace(base, relaxation=Ensemble(0.5)), lambda: replace(base, rule=Lenient(rules[0], 0.5))):
        assert plan_key(made()) == plan_key(made())


def _arguments(processor) -> dict:
    if isinstance(processor, EtaLogitsWarper):
        return {"epsilon": float(processor.epsilon)}
    if isinstance(processor, TemperatureLogitsWarper):
        return {"temperature": processor.temperature}
    return {"top_p": processor.top_p, "min_tokens_to_keep": processor.min_tokens_to_keep}


def test_the_order_of_processors_and_the_stop_rule_count() -> None:
    one, other = TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)
    assert _key(one, other) != _key(other, one)
    assert _key(stop=EntropyStop(0, 0.2)) != _key(stop=EntropyStop(0, 0.3))
