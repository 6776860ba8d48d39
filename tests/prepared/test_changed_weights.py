"""Compiled rounds after a model's weights have changed: plain's tokens, and nothing of the old weights in memory."""

import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from helpers import int8_weights
from helpers.families import pair, prompts
from helpers.patches import interpret_compiled_steps, noted
from torch.nn import Parameter
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.models import recorded_passes
from hf_specdec.prepared.engine import Engine
from hf_specdec.prepared.engine_store import kept_engines

SETTINGS = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    """No others."""
    hf_specdec.release()
    yield
    hf_specdec.release()


def _decodes_as_plain(target: PreTrainedModel, draft: PreTrainedModel, **settings: Any) -> list[tuple[int, ...]]:
    """How many drafts each round accepted."""
    given = {**prompts(2), **SETTINGS}
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        output = target.generate(**given, num_assistant_tokens=2, return_dict_in_generate=True, **settings)
    assert torch.equal(output.sequences, target.generate(**given))
    return [found.accepted for found in output.speculation.rounds]


def _transpose(model: PreTrainedModel) -> None:
    """A square one: the same memory and shape, other strides."""
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.o_proj):
            projection.weight.data = projection.weight.data.t()


@pytest.mark.compiles
def test_a_transposed_weight_is_seen_by_compiled_rounds() -> None:
    target, draft = pair("llama")
    _decodes_as_plain(target, draft, compile=True)
    _transpose(target)
    _decodes_as_plain(target, draft, compile=True)


def test_a_transposed_weight_of_the_draft_is_seen_too(monkeypatch) -> None:
    interpret_compiled_steps(monkeypatch)
    target, draft = pair("llama")
    before = _decodes_as_plain(target, draft, compile=True)
    _transpose(draft)
    after = _decodes_as_plain(target, draft, compile=True)
    assert after == _decodes_as_plain(target, draft) != before
    assert len(kept_engines(target, compile=True)) == 2


@pytest.mark.compiles
def test_a_transposed_weight_is_seen_by_recorded_passes_in_the_kernels(monkeypatch) -> None:
    """Those of the general round."""
    monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 1)
    target, draft = pair("llama")
    settings = {"compile": True, "on_draft_error": "continue"}
    for _ in range(2):
        _decodes_as_plain(target, draft, **settings)
    assert recorded_passes.trials_of(target)
    _transpose(target)
    for _ in range(3):
        _decodes_as_plain(target, draft, **settings)


@pytest.mark.parametrize("compiled", [pytest.param("by inductor", marks=pytest.mark.compiles), "interpreted"])
def test_weights_of_the_same_form_are_read_without_preparing_anew(compiled: str, monkeypatch) -> None:
    if compiled == "interpreted":
        interpret_compiled_steps(monkeypatch)
    prepared = noted(monkeypatch, Engine, "prepare")
    target, draft = pair("llama")
    first = _decodes_as_plain(target, draft, compile=True)
    for module in draft.modules():
        for name, weight in module._parameters.items():
            setattr(module, name, None if weight is None else Parameter(weight.detach().flip(0)))
    assert _decodes_as_plain(target, draft, compile=True) != first
    target.load_state_dict(draft.state_dict())
    _decodes_as_plain(target, draft, compile=True)
    assert len(prepared) == 1


def test_weights_that_are_no_longer_shared_are_read_apart(monkeypatch) -> None:
    """Of a draft whose head was its target's."""
    interpret_compiled_steps(monkeypatch)
    target, draft = pair("llama")
    draft.lm_head.weight = target.lm_head.weight
    shared = _decodes_as_plain(target, draft, compile=True)
    draft.lm_head.weight = Parameter(target.lm_head.weight.detach().flip(0))
    apart = _decodes_as_plain(target, draft, compile=True)
    assert apart == _decodes_as_plain(target, draft) != shared


def _replace(model: PreTrainedModel) -> None:
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                setattr(module, name, Parameter(weight.detach().clone()))


@pytest.mark.compiles
@pytest.mark.parametrize("change", [_replace, int8_weights.quantize])
@pytest.mark.parametrize("how", [{"compile": True}, {"compile": True, "drafter": "suffix"}, {}], ids=str)
def test_nothing_of_replaced_weights_stays(
    change: Callable[[PreTrainedModel], None], how: dict[str, Any], monkeypatch
) -> None:
    monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 1)
    models = target, draft = pair("llama")
    for _ in range(2):
        _decodes_as_plain(target, draft, **how)
    assert kept_engines(target, compile=True) or recorded_passes.trials_of(target)
    old = [ref(weight) for model in models for weight in model.parameters()]
    for model in models:
        change(model)
    gc.collect()
    kept = {id(weight) for model in models for weight in model.parameters()}
    left = [weight() for weight in old if weight() is not None]
    assert {id(weight) for weight in left} <= kept and len(left) < len(old)


def test_only_an_engine_that_runs_holds_weights(monkeypatch) -> None:
    interpret_compiled_steps(monkeypatch)
    target, draft = pair("llama")
    held = target.lm_head.weight._use_count()
    _decodes_as_plain(target, draft, compile=True)
    gc.collect()
    assert target.lm_head.weight._use_count() == held
    (engine,) = kept_engines(target, compile=True)
    weights = ref(target.lm_head.weight)
    with engine.buffers.in_use(), torch.no_grad():
        engine.steps[2].run_once()
        target.lm_head.weight = Parameter(torch.zeros_like(target.lm_head.weight))
        assert weights() is not None
    assert weights() is None
