"""Whatever fails in a call surfaces unchanged and leaves nothing behind; a failing draft can be dropped."""

import warnings
from typing import Any

import pytest
import torch
from helpers.families import pair, prompts
from helpers.pairwise import pairwise
from helpers.streamer import Streamer
from transformers import GenerationMixin, LogitsProcessor, PreTrainedModel, StoppingCriteria

import hf_specdec

SETTINGS = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SPECULATION = {"generation_strategy": "speculative", "num_assistant_tokens": 3}


class InjectedError(Exception):
    """What the tests raise."""


class Countdown:
    """Raises at its n-th call."""

    def __init__(self, calls: int, error: type[BaseException]) -> None:
        self.calls, self.error = calls, error

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise self.error("enough")


class Processor(Countdown, LogitsProcessor):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        super().__call__()
        return scores


class Criterion(Countdown, StoppingCriteria):
    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        super().__call__()
        return torch.zeros(len(ids), dtype=torch.bool)


def hooks(*models: PreTrainedModel) -> int:
    """The number of forward hooks of all modules."""
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for model in models for module in model.modules()
    )


@pytest.mark.parametrize(
    ("place", "family", "error"),
    pairwise(
        ("draft", "target", "processor", "criterion", "streamer"),
        ("llama", "t5"),
        (KeyboardInterrupt, torch.OutOfMemoryError, InjectedError),
    ),
)
def test_an_exception_surfaces_and_the_next_call_is_right(family: str, place: str, error: type[BaseException]) -> None:
    target, draft = pair(family)
    untouched, attributes = GenerationMixin.generate, [set(vars(model)) for model in (target, draft)]
    inputs = prompts(1)
    expected = target.generate(**inputs, **SETTINGS)
    for calls in (1, 2, 5):
        fault, call = Countdown(calls, error), dict[str, Any](SETTINGS | SPECULATION)
        handle = None
        if place in ("draft", "target"):
            # Inside a pass, when part of its layers have written to the cache.
            module = {"draft": draft, "target": target}[place].get_output_embeddings()
            handle = module.register_forward_pre_hook(fault)
        elif place == "processor":
            call["logits_processor"] = [Processor(calls, error)]
        elif place == "criterion":
            call["stopping_criteria"] = [Criterion(calls, error)]
        else:
            call["streamer"] = Streamer(error, calls)
        with hf_specdec.enable(target, assistant_model=draft):
            with pytest.raises(error, match="enough"):
                target.generate(**inputs, **call)
            if handle is not None:
                handle.remove()
            assert torch.equal(target.generate(**inputs, **SETTINGS, **SPECULATION), expected)
        assert GenerationMixin.generate is untouched and hooks(target, draft) == 0
        assert [set(vars(model)) for model in (target, draft)] == attributes
        assert torch.equal(target.generate(**inputs, **SETTINGS), expected)


@pytest.mark.parametrize("calls", [1, 2, 7])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_failing_draft_is_dropped_with_one_warning(calls: int, rows: int) -> None:
    target, draft = pair("llama")
    expected = target.generate(**prompts(rows), **SETTINGS)
    handle = draft.get_output_embeddings().register_forward_pre_hook(Countdown(calls, InjectedError))
    with hf_specdec.enable(target, assistant_model=draft), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = target.generate(**prompts(rows), **SETTINGS, **SPECULATION, on_draft_error="continue")
    handle.remove()
    assert torch.equal(output, expected)
    assert [str(w.message) for w in caught if "on_draft_error" in str(w.message)] != []
    assert sum("on_draft_error" in str(w.message) for w in caught) == 1


def test_an_interrupt_of_a_draft_is_no_error_to_continue_from() -> None:
    target, draft = pair("llama")
    draft.get_output_embeddings().register_forward_pre_hook(Countdown(2, KeyboardInterrupt))
    with hf_specdec.enable(target, assistant_model=draft), pytest.raises(KeyboardInterrupt):
        target.generate(**prompts(1), **SETTINGS, **SPECULATION, on_draft_error="continue")


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_sampling_from_nan_is_refused_by_name(broken: str) -> None:
    target, draft = pair("llama")
    model = {"target": target, "draft": draft}[broken]
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = float("nan")
    call = {**SETTINGS, **SPECULATION, "do_sample": True}
    with hf_specdec.enable(target, assistant_model=draft):
        words = "assistant_model: the draft's scores" if broken == "draft" else "scores"
        with pytest.raises(ValueError, match=words):
            target.generate(**prompts(1), **call)
