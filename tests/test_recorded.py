"""Recorded passes: the model's own to the bit, for all lengths of text; left alone where Python has a say."""

from __future__ import annotations

import gc
import weakref
from types import MethodType

import pytest
import torch
from families import FAMILIES, pair, prompts
from models import llama, noisy

import hf_specdec
from hf_specdec import recorded
from hf_specdec.recorded import MOST, Recorded, recordable

SETTINGS = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Recordings are made at once; one entry for every replay."""
    seen: list[int] = []
    replay = recorded._replay
    monkeypatch.setattr(recorded, "PASSES", 1)
    monkeypatch.setattr(recorded, "_replay", lambda made, inputs: (seen.append(1), replay(made, inputs))[1])
    return seen


def _speculate(target, draft, rows: int = 1, **settings):
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        return target.generate(**prompts(rows), **{**SETTINGS, **settings})


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_passes_are_the_model_s_own_to_the_bit(
    family: str, rows: int, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, so that a single operation in another order would show; lookaheads make passes of many widths."""
    target, draft = pair(family, dtype=torch.float32)
    lookaheads = (1, 4, 7)
    with monkeypatch.context() as unrecorded:
        unrecorded.setattr(recorded, "PASSES", 10**9)
        asked = [_speculate(target, draft, rows, num_assistant_tokens=n) for n in lookaheads]
    assert not replays
    found = [_speculate(target, draft, rows, num_assistant_tokens=n) for n in lookaheads for _ in range(2)]
    assert bool(replays) == (family not in ("bloom", "t5", "mt5", "bart"))
    for one, two, reference in zip(found[::2], found[1::2], asked, strict=True):
        for out in (one, two):
            assert torch.equal(out.sequences, reference.sequences)
            # Rows that have ended are unspecified.
            assert all(torch.equal(a[0], b[0]) for a, b in zip(out.logits[:9], reference.logits[:9], strict=True))


def test_few_recordings_serve_all_widths_and_lengths(replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    trace = torch.jit.trace
    monkeypatch.setattr(torch.jit, "trace", lambda *args, **kwargs: (made.append(1), trace(*args, **kwargs))[1])
    target, draft = pair("llama")
    for lookahead in range(1, 9):
        for length in (7, 12):
            inputs = prompts(1, length=length)
            with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
                target.generate(**inputs, max_new_tokens=30, do_sample=False, num_assistant_tokens=lookahead)
    assert replays and len(made) <= 2 * 2  # one token and several, for target and draft


def test_weights_that_change_in_place_are_seen(replays: list[int]) -> None:
    target, draft = pair("llama")
    _speculate(target, draft)
    seen = len(replays)
    with torch.no_grad():
        for weight in target.parameters():
            weight += 0.3 * torch.randn_like(weight)
    out = _speculate(target, draft)
    assert len(replays) > seen
    assert torch.equal(out.sequences, target.generate(**prompts(1), **SETTINGS).sequences)


def test_hooks_and_replaced_methods_are_called_in_every_pass(replays: list[int]) -> None:
    target, draft = pair("llama")
    _speculate(target, draft)
    seen, calls = len(replays), []
    hook = target.model.layers[1].register_forward_hook(lambda *_: calls.append("hook"))
    rounds = len(_speculate(target, draft).speculation.rounds)
    hook.remove()
    assert len(calls) == rounds
    mlp = target.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = MethodType(lambda self, x: (calls.append("forward"), forward(x))[1], mlp)
    rounds = len(_speculate(target, draft).speculation.rounds)
    assert calls.count("forward") == rounds
    assert not recordable(target) and len(replays) == seen


def test_a_model_that_asks_for_values_is_left_alone(replays: list[int]) -> None:
    """Its way depends on the text: what one pass has recorded would be wrong in another."""

    class Routing(torch.nn.Module):
        def __init__(self, mlp: torch.nn.Module) -> None:
            super().__init__()
            self.mlp = mlp

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            found = self.mlp(states)
            row, position = (found.sum(dim=-1) > 0).nonzero(as_tuple=True)
            return found.index_put((row, position), -found[row, position])

    target = llama()
    draft = noisy(target)
    target.model.layers[0].mlp = Routing(target.model.layers[0].mlp)
    rows = {"input_ids": torch.arange(2, 11).unsqueeze(0), "max_new_tokens": 40, "do_sample": False}
    assert recordable(target)
    plain = target.generate(**rows)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        for _ in range(3):
            assert torch.equal(target.generate(**rows, num_assistant_tokens=1), plain)
    kept = recorded._known.all_of(target).values()
    assert kept and not any(passes.of(1)._recordings for passes in kept)


def test_a_step_that_python_changes_is_never_replayed() -> None:
    """The negative control of the trials: a recording that does not do what the step does is found out."""
    count = [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x + count[0]

    passes = Recorded()
    found = [passes.run(step, [torch.zeros(2)])[0].item() for _ in range(60)]
    assert found == sorted(set(found)), "each call gives another number"
    assert len(passes._recordings) == MOST


def test_recordings_keep_no_model_alive(replays: list[int]) -> None:
    target = llama()
    draft = noisy(target)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        target.generate(**prompts(1), max_new_tokens=30, do_sample=False)
    gone = [weakref.ref(model.model.layers[0].mlp.up_proj.weight) for model in (target, draft)]
    assert replays
    del target, draft
    gc.collect()
    assert not any(weight() is not None for weight in gone)


def test_a_model_in_training_and_one_under_autocast_are_left_alone() -> None:
    target, _ = pair("llama")
    assert recordable(target)
    assert not recordable(target.train())
    target.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not recordable(target)
