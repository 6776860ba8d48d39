"""Kernels in passes that are not compiled: with `compile=True` only, with the same tokens, and where they can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.families import prompts
from helpers.models import VOCABULARY, llama, noisy, t5
from optimum.quanto import freeze, qint8, quantize
from optimum.quanto.tensor.weights.qbytes import WeightQBytesLinearFunction
from torch import Tensor
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.models.onednn_linears import OneDnnLinears
from hf_specdec.models.recorded_passes import recorded_passes, recordings_of
from hf_specdec.prepared import few_token_products, pass_kernels
from hf_specdec.prepared.few_token_products import MOST_TOKENS, FewTokenProducts

pytestmark = pytest.mark.compiles

GREEDY = {"max_new_tokens": 24, "do_sample": False, "disable_tqdm": True, "generation_strategy": "speculative"}

# Settings whose rounds are not compiled.
UNCOMPILED: dict[str, dict[str, Any]] = {
    "suffix": {"drafter": "suffix"},
    "hybrid": {"drafter": "hybrid"},
    "no draft": {"drafter": "none", "repetition_penalty": 1.3},
    "text": {"repetition_penalty": 1.3},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the kernels' linear layers."""
    seen: list[int] = []
    linear = few_token_products._linear

    def noted(input: Tensor, *others: Tensor | None) -> Tensor:
        seen.append(input.shape[:-1].numel())
        return linear(input, *others)

    monkeypatch.setattr(few_token_products, "_linear", noted)
    return seen


def _call(target: PreTrainedModel, draft: PreTrainedModel, rows: int, **settings: Any) -> Tensor:
    given = {} if settings.get("drafter") in ("suffix", "none") else {"assistant_model": draft}
    with hf_specdec.enable(target):
        out = target.generate(**prompts(rows), **GREEDY, **given, **settings)
    return out if isinstance(out, Tensor) else out.sequences


def _plain(target: PreTrainedModel, rows: int, settings: dict[str, Any]) -> Tensor:
    rest = {name: value for name, value in settings.items() if name == "repetition_penalty"}
    plain: Tensor = target.generate(**prompts(rows), max_new_tokens=24, do_sample=False, **rest)
    return plain


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", UNCOMPILED.values(), ids=UNCOMPILED)
def test_they_give_plain_tokens_where_rounds_are_not_compiled(settings, rows: int, products: list[int]) -> None:
    """Also from recordings, which later calls replay; without `compile=True` nothing runs in the kernels."""
    target = llama()
    draft = noisy(target)
    plain = _plain(target, rows, settings)
    assert torch.equal(_call(target, draft, rows, **settings), plain) and not products
    for _ in range(3):
        assert torch.equal(_call(target, draft, rows, **settings, compile=True), plain)
    assert products
    before = len(products)
    assert torch.equal(_call(target, draft, rows, **settings), plain) and len(products) == before


def test_encoder_decoder_models_use_them(products: list[int]) -> None:
    target = t5()
    draft = noisy(target)
    inputs = torch.arange(8).unsqueeze(0) + 20
    with hf_specdec.enable(target):
        plain = target.generate(inputs, max_new_tokens=24, do_sample=False)
        found = target.generate(inputs, **GREEDY, assistant_model=draft, compile=True)
    assert torch.equal(found, plain) and set(products) > {1}


def test_recordings_belong_to_their_kernels() -> None:
    target = llama()
    draft = noisy(target)
    target.config.max_position_embeddings = 20  # longer calls are not compiled
    with_kernels, without = recorded_passes(target, pass_kernels.pass_kernels), recorded_passes(target)
    for _ in range(3):
        _call(target, draft, 1, **UNCOMPILED["no draft"], compile=True)
    assert with_kernels is not None and without is not None
    assert (with_kernels.made, without.made) == (1, 0)
    for _ in range(3):
        _call(target, draft, 1, **UNCOMPILED["no draft"])
    assert (with_kernels.made, without.made, recordings_of(target)) == (1, 1, 2)


def test_int8_weights_never_meet_their_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the prompt's pass nor in later ones, with `compile=True`."""
    target = llama().float()
    quantize(target, weights=qint8)
    freeze(target)
    draft, widened = noisy(llama().float()), list[Tensor]()
    apply = WeightQBytesLinearFunction.apply
    monkeypatch.setattr(WeightQBytesLinearFunction, "apply", lambda *args: widened.append(args[0]) or apply(*args))
    plain = _plain(target, 1, {})
    assert widened
    widened.clear()
    assert torch.equal(_call(target, draft, 1, drafter="suffix", compile=True), plain) and not widened


@pytest.mark.parametrize("reason", ["no compiler", "autocast", "another processor"])
def test_where_there_are_none_passes_run_as_before(
    reason: str, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = llama().float() if reason == "autocast" else llama()
    draft = noisy(target)
    target.config.max_position_embeddings = 20  # longer calls are not compiled
    pass_kernels.kernels_loaded.cache_clear()
    if reason == "no compiler":
        monkeypatch.setattr(few_token_products, "load", _fails)
    elif reason == "another processor":
        monkeypatch.setattr(few_token_products, "supported", lambda: False)
    with torch.autocast("cpu", enabled=reason == "autocast"):
        plain = _plain(target, 1, {})
        assert torch.equal(_call(target, draft, 1, drafter="suffix", compile=True), plain)
    pass_kernels.kernels_loaded.cache_clear()
    assert not products


def _fails(library: str, dtype: torch.dtype) -> None:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(("tokens", "taken"), [(MOST_TOKENS, "kernels"), (MOST_TOKENS + 1, "others")])
def test_what_they_do_not_take_goes_to_others(tokens: int, taken: str, products: list[int]) -> None:
    """Only linear layers do, once each."""
    seen: list[Callable[..., Any]] = []

    class Others(OneDnnLinears):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    weight, states = torch.randn(VOCABULARY, 32), torch.randn(tokens, 32)
    few_token_products.load("wide", torch.float32)
    with torch.inference_mode(), FewTokenProducts(Others()):
        found = torch.relu(torch.nn.functional.linear(states, weight))
    torch.testing.assert_close(found, torch.relu(states @ weight.T))
    assert (len(products), len(seen)) == ((1, 0) if taken == "kernels" else (0, 1))
