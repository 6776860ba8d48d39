"""Compiled passes of general rounds: plain tokens, nothing compiled twice, and a word where nothing is compiled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.auto_lengths import choose_in_turn
from helpers.families import prompts
from helpers.interpreted_steps import interpret_compiled_steps
from helpers.models import llama, noisy, t5
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_specdec
from hf_specdec.prepared import own_builds
from hf_specdec.prepared.compiled_step import CompiledStep
from hf_specdec.prepared.engine_store import STORE
from hf_specdec.prepared.prepared_passes import WIDEST, PreparedPasses

GREEDY = {"max_new_tokens": 24, "do_sample": False}
PROCESSORS = {"repetition_penalty": 1.3, "min_new_tokens": 5, "suppress_tokens": [3, 4]}

# Settings whose rounds can't be compiled as a whole.
SETTINGS: dict[str, dict[str, Any]] = {
    "text": PROCESSORS,
    "no draft": {"drafter": "none", **PROCESSORS},
    "suffix": {"drafter": "suffix", "num_assistant_tokens": 4},
    "hybrid": {"drafter": "hybrid"},
    "careful": {"on_draft_error": "continue"},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "automatic": {"num_assistant_tokens": "auto", **PROCESSORS},
}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths of passes that were compiled."""
    interpret_compiled_steps(monkeypatch)
    widths: list[int] = []
    make = CompiledStep.compile

    def noted(self: CompiledStep, *given: Any) -> None:
        widths.append(given[0].shape[1])
        make(self, *given)

    monkeypatch.setattr(CompiledStep, "compile", noted)
    return widths


def _call(target: PreTrainedModel, draft: PreTrainedModel, rows: int, length: int = 11, **settings: Any) -> Tensor:
    given = {} if settings.get("drafter") in ("suffix", "none") else {"assistant_model": draft}
    with hf_specdec.enable(target):
        out = target.generate(
            **prompts(rows, length), **GREEDY, **given, generation_strategy="speculative", compile=True, **settings
        )
    return out if isinstance(out, Tensor) else out.sequences


def _plain(target: PreTrainedModel, rows: int, length: int, settings: dict[str, Any]) -> Tensor:
    plain: Tensor = target.generate(
        **prompts(rows, length), **GREEDY, **{name: settings[name] for name in PROCESSORS if name in settings}
    )
    return plain


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_plain_ones_and_warm_calls_compile_nothing(
    settings, rows: int, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_in_turn(monkeypatch, 4, 0, 2)  # the lengths of automatic drafts, which times would decide
    target = llama()
    draft = noisy(target)
    calls: list[int] = []
    for length in (11, 40, 11, 40, 11):
        compiled.clear()
        assert torch.equal(_call(target, draft, rows, length, **settings), _plain(target, rows, length, settings))
        calls.append(len(compiled))
    assert calls[0] and not any(calls[-2:])


def test_the_tokens_are_those_of_compiled_passes(compiled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: a pass that returns other logits gives other tokens."""
    target = llama()
    draft, run = noisy(target), PreparedPasses.run

    def reversed_logits(self: PreparedPasses, *given: Tensor) -> tuple[Tensor, Tensor | None] | None:
        done = run(self, *given)
        return None if done is None else (-done[0], done[1])

    monkeypatch.setattr(PreparedPasses, "run", reversed_logits)
    assert not torch.equal(_call(target, draft, 1, **PROCESSORS), _plain(target, 1, 11, PROCESSORS))


def test_a_pass_runs_in_one_of_up_to_twice_its_width_and_no_prompt_is_compiled(compiled: list[int]) -> None:
    target = llama()
    draft = noisy(target)
    _call(target, draft, 1, 40, num_assistant_tokens=6, **PROCESSORS)
    assert max(compiled) <= WIDEST and not {4, 5, 6} & set(compiled)
    assert 7 in compiled
    assert STORE.prepared_passes(target) == len(compiled) and STORE.prepared_passes(draft) == 0


def test_where_a_pass_can_not_be_compiled_the_call_goes_on(
    compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: CompiledStep, *given: Any) -> None:
        raise RuntimeError("no space")

    target = llama()
    draft = noisy(target)
    monkeypatch.setattr(CompiledStep, "compile", fails)
    monkeypatch.setattr(own_builds, "_told", set())
    with pytest.warns(UserWarning, match="decoding goes on without.*no space"):
        assert torch.equal(_call(target, draft, 1, **PROCESSORS), _plain(target, 1, 11, PROCESSORS))


@pytest.mark.parametrize("settings", [{}, PROCESSORS], ids=["rounds", "passes"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_chat_goes_on_from_the_caller_s_cache(settings: dict[str, Any], rows: int, compiled: list[int]) -> None:
    """Its tokens are not read again, and it is left as plain `generate` leaves it."""
    target = llama()
    draft = noisy(target)
    asked = {**GREEDY, **settings, "eos_token_id": None}
    drafting = {"assistant_model": draft, "generation_strategy": "speculative", "compile": True}
    text, said = (torch.randint(5, 40, (rows, length), generator=torch.manual_seed(7)) for length in (11, 6))
    plain, ours = DynamicCache(config=target.config), DynamicCache(config=target.config)
    with hf_specdec.enable(target):
        for turn in range(3):
            compiled.clear()
            expected = target.generate(text, **asked, past_key_values=plain)
            out = target.generate(text, **asked, **drafting, past_key_values=ours, return_dict_in_generate=True)
            assert torch.equal(out.sequences, expected) and out.past_key_values is ours
            assert out.speculation.rounds[0].width <= 6 + 6 if turn else bool(compiled)
            assert ours.get_seq_length() == plain.get_seq_length() == expected.shape[1] - 1
            for one, other in zip(ours.layers, plain.layers, strict=True):
                torch.testing.assert_close(one.keys, other.keys)
                torch.testing.assert_close(one.values, other.values)
            text = torch.cat([expected, said], dim=1)
    assert not compiled


def _going_on(target: PreTrainedModel) -> dict[str, Any]:
    """The rest of a text, whose beginning is in the cache alone."""
    cache, inputs = DynamicCache(config=target.config), prompts(1)
    target(inputs["input_ids"][:, :5], past_key_values=cache)
    return {**inputs, "input_ids": inputs["input_ids"][:, 5:], "past_key_values": cache}


REFUSED: dict[str, tuple[Any, str]] = {
    "a text in the cache alone": (lambda model: _going_on(model), "past_key_values"),
    "beyond the context": (lambda model: prompts(1) | {"max_new_tokens": 400}, "lower max_new_tokens"),
    "a masked token": (
        lambda model: prompts(1) | {"attention_mask": torch.ones(1, 11).long().index_fill(1, torch.tensor([10]), 0)},
        "Pad on the left",
    ),
    "an encoder": (lambda model: {"input_ids": torch.arange(8).unsqueeze(0) + 20}, "static cache"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_calls_that_compile_nothing_say_why_once(
    reason: str, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = t5() if reason == "an encoder" else llama()
    draft = noisy(target)
    inputs, said = REFUSED[reason]
    monkeypatch.setattr(own_builds, "_told", set())
    settings = {**GREEDY, "assistant_model": draft, "generation_strategy": "speculative", "compile": True}
    with hf_specdec.enable(target):
        with pytest.warns(UserWarning, match=f"compile=True compiles no passes of this call.*{said}"):
            target.generate(**{**settings, **inputs(target)})
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            target.generate(**{**settings, **inputs(target)})
    assert not compiled
