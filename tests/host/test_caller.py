"""Warnings point at the user's own call, through this package, transformers and torch."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.families import pair, prompts

import hf_specdec
from hf_specdec import SpeculativeDecoding
from hf_specdec.prepared import compiled_step
from hf_specdec.prepared.engine import Engine

SETTINGS = {"max_new_tokens": 8, "do_sample": False}


def fails(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("of the test")


def uncompilable(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(compiled_step, "compile_refusal", lambda device: None)
    monkeypatch.setattr(Engine, "prepare", fails)
    return {"compile": True}


def too_old(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    return {"compile": True}


def without_draft(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"on_draft_error": "continue"}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("cause", [uncompilable, too_old, without_draft])
def test_a_warning_names_the_line_that_called_generate(
    cause: Callable[[pytest.MonkeyPatch], dict[str, Any]], enabled: bool, monkeypatch
) -> None:
    target, draft = pair("llama")
    settings = {**SETTINGS, **cause(monkeypatch)}
    if cause is without_draft:
        draft.get_output_embeddings().register_forward_pre_hook(fails)
    here = inspect.currentframe()
    assert here is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if enabled:
            with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
                line = here.f_lineno + 1
                target.generate(**prompts(1), **settings)
        else:
            decoding = SpeculativeDecoding(draft, **{name: settings.pop(name) for name in [*settings][2:]})
            line = here.f_lineno + 1
            target.generate(**prompts(1), **settings, custom_generate=decoding)
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]
