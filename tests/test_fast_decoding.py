"""Rounds over static buffers: plain `generate`'s tokens and distribution, whether compiled, captured or just called.

Where nothing is compiled, `captures` says yes on a CPU, so that what a CUDA graph would capture runs eagerly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from families import EAGER, FAMILIES, pair, prompts
from test_distribution import FALSE_FAILURE, odds
from test_distribution import pair as toy_pair  # noqa: F401
from test_static_cache import ROWS_FAMILIES

import hf_specdec
from hf_specdec import SpeculativeDecoding, captured
from hf_specdec.fast_decoding import KEPT_ENGINES, FastDecoder, fast_capacity
from hf_specdec.sampling import draw

NEW_TOKENS = 16
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


@pytest.fixture
def fast_rounds(monkeypatch) -> Iterator[list[FastDecoder]]:
    """Rounds run as on CUDA, but uncaptured; lists who ran them."""
    ran: list[FastDecoder] = []
    run_round = FastDecoder._round

    def listed(self: FastDecoder, *args):
        ran.append(self)
        return run_round(self, *args)

    monkeypatch.setattr(captured, "captures", lambda device: True)
    monkeypatch.setattr(FastDecoder, "_round", listed)
    with hf_specdec.enable(generation_strategy="speculative"):
        yield ran


@pytest.mark.parametrize("family", ROWS_FAMILIES)
def test_greedy_tokens_are_those_of_plain_generate(family: str, fast_rounds) -> None:
    for batch_size in (1, 4):
        dtype = torch.float32 if family in EAGER and batch_size > 1 else torch.float64
        target, draft = pair(family, dtype=dtype)
        inputs = prompts(batch_size)
        plain = target.generate(**inputs, **GREEDY, generation_strategy=None)
        settings = {**inputs, **GREEDY, "assistant_model": draft, "cache_implementation": "static"}
        for lookahead in (1, 4):
            assert torch.equal(target.generate(**settings, num_assistant_tokens=lookahead), plain)
        assert torch.equal(target.generate(**settings, drafter="none"), plain)
        lossless = {"generation_strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.2}
        assert torch.equal(target.generate(**settings, **lossless), plain)
    assert fast_rounds


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"verification": "block"},
        {"entropy_threshold": 0.6},
        {"strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.4},
    ],
    ids=str,
)
def test_outputs_are_distributed_as_the_target_s_own(toy_pair, fast_rounds, settings: dict) -> None:  # noqa: F811
    decoding = SpeculativeDecoding(toy_pair[1], num_assistant_tokens=2, **settings)
    assert min(odds(toy_pair, decoding, temperature=1.4, top_p=0.8, cache_implementation="static")) > FALSE_FAILURE
    assert fast_rounds


def test_control_one_uniform_number_for_all_draws_fails(toy_pair, fast_rounds, monkeypatch) -> None:  # noqa: F811
    """Draws that are not independent are found."""
    monkeypatch.setattr("hf_specdec.sampling.draw", lambda weights, uniform: draw(weights, uniform * 0 + 0.5))
    decoding = SpeculativeDecoding(toy_pair[1], num_assistant_tokens=2)
    assert max(odds(toy_pair, decoding, cache_implementation="static")) < FALSE_FAILURE
    assert fast_rounds


def test_statistics_are_those_of_the_general_rounds(fast_rounds) -> None:
    target, draft = pair("llama")
    settings = {**prompts(4), **GREEDY, "assistant_model": draft, "return_dict_in_generate": True}
    # A threshold between the extremes: some of this pair's drafts stop at once, some never.
    stopped = {"generation_strategy": "speculative", "entropy_threshold": 0.2}
    for strategy in ({"generation_strategy": "speculative"}, {"generation_strategy": "bild"}, stopped):
        general, fast = (
            target.generate(**settings, **strategy, cache_implementation=kind).speculation.rounds
            for kind in ("dynamic", "static")
        )
        if strategy is stopped:
            assert {1, 4} <= {n for round_ in general for n in round_.drafted}
        for name in ("drafted", "accepted", "new_tokens"):
            assert [getattr(r, name) for r in general] == [getattr(r, name) for r in fast]
        for one, other in zip(general, fast, strict=True):
            assert one.overlap == pytest.approx(other.overlap, rel=1e-5)


def test_later_calls_see_nothing_of_earlier_ones(fast_rounds) -> None:
    """One engine serves texts of other lengths and paddings, and a returned cache is the caller's own."""
    target, draft = pair("gpt2")
    settings = {**GREEDY, "assistant_model": draft, "cache_implementation": "static"}
    first = target.generate(**prompts(3), **settings, return_dict_in_generate=True)
    kept = first.past_key_values.layers[0].keys.clone()
    for length, seed in ((7, 3), (20, 4), (9, 5)):
        inputs = prompts(3, length, seed)
        plain = target.generate(**inputs, **GREEDY, generation_strategy=None)
        assert torch.equal(target.generate(**inputs, **settings), plain)
    assert len({id(decoder.engine) for decoder in fast_rounds}) == 1
    assert torch.equal(first.past_key_values.layers[0].keys, kept)


def test_calls_in_and_out_of_inference_mode_share_an_engine(fast_rounds) -> None:
    target, draft = pair("llama")
    settings = {**prompts(2), **GREEDY, "assistant_model": draft, "cache_implementation": "static"}
    plain = target.generate(**prompts(2), **GREEDY, generation_strategy=None)
    with torch.inference_mode():
        assert torch.equal(target.generate(**settings), plain)
    assert torch.equal(target.generate(**settings), plain)
    assert len({id(decoder.engine) for decoder in fast_rounds}) == 1


def test_changed_weights_get_an_engine_of_their_own_and_few_are_kept(fast_rounds) -> None:
    target, draft = pair("llama")
    settings = {**prompts(1), **GREEDY, "assistant_model": draft, "cache_implementation": "static"}
    target.generate(**settings)
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.flip(0))
    assert torch.equal(target.generate(**settings), target.generate(**prompts(1), **GREEDY, generation_strategy=None))
    for lookahead in range(1, KEPT_ENGINES + 2):
        target.generate(**settings, num_assistant_tokens=lookahead)
    assert len(target._speculation_engines) == KEPT_ENGINES
    assert len(copy.deepcopy(target)._speculation_engines) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"output_scores": True, "return_dict_in_generate": True},
        {"drafter": "hybrid"},
        {"num_assistant_tokens": "auto"},
        {"use_cache": False},
        {"input_ids": torch.tensor([[5]]), "attention_mask": torch.tensor([[1]])},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_needs_the_general_round_gets_it(fast_rounds, settings: dict) -> None:
    target, draft = pair("llama")
    call = {**prompts(1), **GREEDY, **settings}
    speculative = target.generate(**call, assistant_model=draft, compile=True)
    plain = target.generate(
        **{k: v for k, v in call.items() if k not in ("drafter", "num_assistant_tokens")}, generation_strategy=None
    )
    if "output_scores" in settings:
        speculative, plain = speculative.sequences, plain.sequences
    assert torch.equal(speculative, plain)
    assert not fast_rounds


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ROWS_FAMILIES])
def test_compile_is_no_error_where_it_cannot_be(family: str) -> None:
    target, draft = pair(family)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        out = target.generate(**prompts(1), **GREEDY, compile=True)
    assert torch.equal(out, target.generate(**prompts(1), **GREEDY))


def test_a_failed_compilation_is_told_and_decoding_goes_on(monkeypatch) -> None:
    def broken(step, **_):
        def run(*args):
            raise torch._dynamo.exc.TorchDynamoException("no compiler here")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    target, draft = pair("llama")
    with (
        hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"),
        pytest.warns(UserWarning, match="no compiler here"),
    ):
        out = target.generate(**prompts(1), **GREEDY, compile=True)
    assert torch.equal(out, target.generate(**prompts(1), **GREEDY))


def test_compiled_tokens_are_plain_ones_and_later_calls_compile_nothing() -> None:
    """The one test that compiles: a step to draft, a step to verify."""
    target, draft = pair("llama")
    torch._dynamo.reset()
    # The counter goes on over resets, and other tests compile, too.
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    graphs = []
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        for length, seed in ((11, 1), (6, 2), (40, 3), (11, 4)):
            inputs = prompts(2, length, seed)
            out = target.generate(**inputs, **GREEDY, num_assistant_tokens=2, compile=True)
            assert torch.equal(out, target.generate(**inputs, **GREEDY, generation_strategy=None))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert graphs == [2, 2, 2, 2]


def test_calls_of_similar_length_share_a_capacity_that_wastes_little() -> None:
    sizes = [fast_capacity(tokens) for tokens in range(1, 4097)]
    assert sizes == sorted(sizes) and sizes[0] == 128 and sizes[-1] == 4096
    assert all(tokens <= size for tokens, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * tokens for tokens, size in enumerate(sizes, 1) if tokens > 512)
    assert len(set(sizes)) == 16
