"""Passes of general rounds, compiled or in the kernels: plain tokens, nothing compiled twice or without a word."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.families import prompts
from helpers.identity import speculated
from helpers.models import VOCABULARY, llama, noisy, t5
from helpers.patches import choose_in_turn, interpret_compiled_steps, noted
from optimum.quanto import freeze, qint8, quantize
from optimum.quanto.tensor.weights.qbytes import WeightQBytesLinearFunction
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_specdec
from hf_specdec.models.onednn_linears import OneDnnLinears
from hf_specdec.models.recorded_passes import recorded_passes
from hf_specdec.prepared import few_token_products, own_builds, pass_kernels
from hf_specdec.prepared.compiled_step import CompiledStep
from hf_specdec.prepared.engine_store import STORE
from hf_specdec.prepared.few_token_products import MOST_TOKENS, FewTokenProducts
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
def compiled(monkeypatch) -> list[int]:
    """The widths of passes that were compiled."""
    interpret_compiled_steps(monkeypatch)
    return noted(monkeypatch, CompiledStep, "compile", lambda self, tokens, *_: tokens.shape[1])


def _call(
    target: PreTrainedModel, draft: PreTrainedModel, rows: int, length: int = 11, compile: bool = True, **settings: Any
) -> Tensor:
    given = {} if settings.get("drafter") in ("suffix", "none") else {"assistant_model": draft}
    out = speculated(target, None, **prompts(rows, length), **GREEDY, **given, compile=compile, **settings)
    return out if isinstance(out, Tensor) else out.sequences


def _plain(target: PreTrainedModel, rows: int, length: int, settings: dict[str, Any]) -> Tensor:
    own = {name: settings[name] for name in PROCESSORS if name in settings}
    return target.generate(**prompts(rows, length), **GREEDY, **own)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_plain_ones_and_warm_calls_compile_nothing(settings, rows: int, compiled, monkeypatch) -> None:
    choose_in_turn(monkeypatch, 4, 0, 2)  # the lengths of automatic drafts, which times would decide
    target = llama()
    draft = noisy(target)
    calls: list[int] = []
    for length in (11, 40, 11, 40, 11):
        compiled.clear()
        assert torch.equal(_call(target, draft, rows, length, **settings), _plain(target, rows, length, settings))
        calls.append(len(compiled))
    assert calls[0] and not any(calls[-2:])


def test_the_tokens_are_those_of_compiled_passes(compiled: list[int], monkeypatch) -> None:
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
    assert max(compiled) <= WIDEST and not {4, 5, 6} & set(compiled) and 7 in compiled
    assert STORE.prepared_passes(target) == len(compiled) and STORE.prepared_passes(draft) == 0


def test_where_a_pass_can_not_be_compiled_the_call_goes_on(compiled: list[int], monkeypatch) -> None:
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
def test_calls_that_compile_nothing_say_why_once(reason: str, compiled: list[int], monkeypatch) -> None:
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


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """The numbers of tokens of the kernels' linear layers."""
    return noted(monkeypatch, few_token_products, "_linear", lambda input, *_: input.shape[:-1].numel())


@pytest.mark.compiles
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["suffix", "hybrid", "no draft", "text", "scores"])
def test_kernels_give_plain_tokens_where_rounds_are_not_compiled(name: str, rows: int, products: list[int]) -> None:
    """Also from recordings, which later calls replay; without `compile=True` nothing runs in the kernels."""
    target, settings = llama(), SETTINGS[name]
    draft = noisy(target)
    plain = _plain(target, rows, 11, settings)
    assert torch.equal(_call(target, draft, rows, compile=False, **settings), plain) and not products
    for _ in range(3):
        assert torch.equal(_call(target, draft, rows, **settings), plain)
    assert products
    before = len(products)
    assert torch.equal(_call(target, draft, rows, compile=False, **settings), plain) and len(products) == before


@pytest.mark.compiles
def test_encoder_decoder_models_use_kernels(products: list[int]) -> None:
    target = t5()
    draft = noisy(target)
    inputs = torch.arange(8).unsqueeze(0) + 20
    plain = target.generate(inputs, **GREEDY)
    assert torch.equal(speculated(target, draft, inputs, **GREEDY, compile=True), plain) and set(products) > {1}


@pytest.mark.compiles
def test_recordings_belong_to_their_kernels() -> None:
    target = llama()
    draft = noisy(target)
    target.config.max_position_embeddings = 20  # longer calls are not compiled
    with_kernels, without = recorded_passes(target, pass_kernels.pass_kernels), recorded_passes(target)
    for _ in range(3):
        _call(target, draft, 1, drafter="none", repetition_penalty=1.3)
    assert with_kernels is not None and without is not None
    assert (with_kernels.made, without.made) == (1, 0)
    for _ in range(3):
        _call(target, draft, 1, compile=False, drafter="none", repetition_penalty=1.3)
    assert (with_kernels.made, without.made) == (1, 1)


@pytest.mark.compiles
def test_int8_weights_never_meet_their_own_library(monkeypatch) -> None:
    """Neither in the prompt's pass nor in later ones, with `compile=True`."""
    target = llama().float()
    quantize(target, weights=qint8)
    freeze(target)
    draft, widened = noisy(llama().float()), list[Tensor]()
    apply = WeightQBytesLinearFunction.apply
    monkeypatch.setattr(WeightQBytesLinearFunction, "apply", lambda *args: widened.append(args[0]) or apply(*args))
    plain = _plain(target, 1, 11, {})
    assert widened
    widened.clear()
    assert torch.equal(_call(target, draft, 1, drafter="suffix"), plain) and not widened


@pytest.mark.compiles
@pytest.mark.parametrize("reason", ["no compiler", "autocast", "another processor"])
def test_where_there_are_no_kernels_passes_run_as_before(reason: str, products: list[int], monkeypatch) -> None:
    target = llama().float() if reason == "autocast" else llama()
    draft = noisy(target)
    target.config.max_position_embeddings = 20  # longer calls are not compiled
    pass_kernels.kernels_loaded.cache_clear()
    if reason == "no compiler":
        monkeypatch.setattr(few_token_products, "load", _fails)
    elif reason == "another processor":
        monkeypatch.setattr(few_token_products, "supported", lambda: False)
    with torch.autocast("cpu", enabled=reason == "autocast"):
        plain = _plain(target, 1, 11, {})
        assert torch.equal(_call(target, draft, 1, drafter="suffix"), plain)
    pass_kernels.kernels_loaded.cache_clear()
    assert not products


def _fails(library: str, dtype: torch.dtype) -> None:
    raise RuntimeError("no compiler")


@pytest.mark.compiles
@pytest.mark.parametrize(("tokens", "taken"), [(MOST_TOKENS, "kernels"), (MOST_TOKENS + 1, "others")])
def test_what_kernels_do_not_take_goes_to_others(tokens: int, taken: str, products: list[int]) -> None:
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
