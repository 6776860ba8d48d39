"""Engines between calls: bounded in bytes, freed with their models, clean for the next call."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from helpers.families import pair, prompts
from helpers.patches import interpret_compiled_steps, noted

import hf_specdec
from hf_specdec.prepared import cuda_graphs, engine_store
from hf_specdec.prepared.engine import Engine
from hf_specdec.prepared.engine_store import STORE, kept_engines

GREEDY = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}


@pytest.fixture(autouse=True)
def fast_rounds(monkeypatch) -> Iterator[None]:
    """Prepared rounds without compiling, and no engines of other tests."""
    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    hf_specdec.release()
    with hf_specdec.enable(generation_strategy="speculative"):
        yield
    hf_specdec.release()


def _call(target, draft, **settings) -> torch.Tensor:
    return target.generate(**prompts(2), **GREEDY, assistant_model=draft, **settings)


@pytest.mark.parametrize("gone", ["target", "draft"])
def test_an_engine_goes_with_its_models_at_once(gone: str) -> None:
    """Without a run of the cyclic collector."""
    target, draft = pair("llama")
    _call(target, draft)
    models = {"target": target, "draft": draft}
    caches = [weakref.ref(engine.target.cache) for engine in kept_engines(target, compile=False)]
    assert len(caches) == 1
    gc.collect()
    gc.disable()
    try:
        del target, draft
        del models[gone]
        assert len(STORE.of_all()) == 0 and caches[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("by", ["target", "draft", "disable", "all"])
def test_release_gives_back_and_later_calls_prepare_anew(by: str) -> None:
    target, draft = pair("llama")
    plain = _call(target, draft)
    assert kept_engines(target, compile=False)
    if by == "disable":
        with hf_specdec.enable(target):
            hf_specdec.disable(target)
    else:
        hf_specdec.release({"target": target, "draft": draft, "all": None}[by])
    assert not kept_engines(target, compile=False) and torch.equal(_call(target, draft), plain)


def test_release_of_another_model_changes_nothing() -> None:
    target, draft = pair("llama")
    _call(target, draft)
    hf_specdec.release(pair("gpt2")[0])
    assert len(kept_engines(target, compile=False)) == 1


@pytest.mark.parametrize("moved", ["target", "draft"])
def test_the_next_call_of_any_model_gives_back_the_engines_of_one_that_was_moved(moved: str) -> None:
    target, draft = pair("llama")
    _call(target, draft)
    cache = weakref.ref(kept_engines(target, compile=False)[0].target.cache)
    others = pair("gpt2")
    others[0].generate(**prompts(1), max_new_tokens=2, assistant_model=others[1])
    assert cache() is not None
    {"target": target, "draft": draft}[moved].to("meta")
    others[0].generate(**prompts(1), max_new_tokens=2, assistant_model=others[1])
    assert cache() is None


@pytest.mark.parametrize("captured", [True, False])
def test_caches_stay_within_a_bound_before_others_are_made(captured: bool, monkeypatch) -> None:
    """Those used longest ago make room: captured steps go with them, compiled ones stay and get new ones."""
    if not captured:
        interpret_compiled_steps(monkeypatch)
        monkeypatch.setattr(cuda_graphs, "captures", lambda device: False)
    target, draft = pair("llama")
    settings = {"assistant_model": draft, "num_assistant_tokens": 2, "compile": not captured}

    def call(rows: int) -> torch.Tensor:
        return target.generate(**prompts(rows), **{**GREEDY, "max_new_tokens": 4}, **settings)

    expected = {rows: call(rows) for rows in (1, 2)}
    small, large = sorted(engine.buffers.nbytes for engine in kept_engines(target, compile=not captured))
    hf_specdec.release()
    monkeypatch.setattr(engine_store, "KEPT_BYTES", large + small // 2)
    held, make_room = [], STORE.make_room

    def seen(nbytes: int, like: torch.Tensor) -> None:
        make_room(nbytes, like)
        held.append(nbytes + sum({id(one.buffers): one.buffers.nbytes for one in STORE.of_all()}.values()))

    monkeypatch.setattr(STORE, "make_room", seen)
    prepared = noted(monkeypatch, Engine, "prepare")
    for rows in (1, 2) * 3:
        assert torch.equal(call(rows), expected[rows])
    assert len(held) >= 6 and max(held) <= engine_store.KEPT_BYTES
    assert len(prepared) == (6 if captured else 2)


def test_numbers_of_one_call_do_not_reach_the_next() -> None:
    """A NaN that is left in a cache would pass through masks; slots that no call has reached are zeros."""
    target, draft = pair("llama")
    plain = _call(target, draft)
    for engine in kept_engines(target, compile=False):
        for side in (engine.target, engine.draft):
            for stored in side.cache.tensors():
                assert not stored[:, :, engine.buffers.reached :].any()
                stored[:, :, : engine.buffers.reached].fill_(torch.nan)
    assert torch.equal(_call(target, draft), plain)
