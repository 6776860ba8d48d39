"""Rounds over static buffers: plain `generate`'s tokens and distribution, whether compiled, captured or just called.

Where nothing is compiled, `captures` says yes on a CPU, so that what a CUDA graph would capture runs eagerly.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from itertools import cycle

import pytest
import torch
from helpers.distributions import FALSE_FAILURE, odds
from helpers.families import EAGER, FAMILIES, ROWS_FAMILIES, pair, prompts
from helpers.pairwise import pairwise
from torch._dynamo.utils import counters

import hf_specdec
from hf_specdec import SpeculativeDecoding
from hf_specdec.lengths.auto_length import PREPARED_LENGTHS, AutoLength
from hf_specdec.prepared import compiled_step, cuda_graphs, engine, lap_timer, prepared_decoder
from hf_specdec.prepared.engine import Engine, prepared_capacity
from hf_specdec.prepared.engine_store import KEPT_ENGINES, kept_engines
from hf_specdec.prepared.prepared_decoder import PreparedDecoder
from hf_specdec.rules.sampling import draw

NEW_TOKENS = 16
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


@pytest.fixture
def fast_rounds(monkeypatch) -> Iterator[list[PreparedDecoder]]:
    """Rounds run as on CUDA, but uncaptured; lists who ran them."""
    ran: list[PreparedDecoder] = []
    run_round = PreparedDecoder._round

    def listed(self: PreparedDecoder, *args):
        ran.append(self)
        return run_round(self, *args)

    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    monkeypatch.setattr(PreparedDecoder, "_round", listed)
    with hf_specdec.enable(generation_strategy="speculative"):
        yield ran


def choose_in_turn(monkeypatch, *lengths: int, first: int = 1) -> None:
    """What "auto" chooses after its first round, again and again; so that both kinds of rounds draft alike."""
    monkeypatch.setattr(AutoLength, "use_prepared", lambda self, ready: setattr(self, "limit", first))
    turns: dict[AutoLength, Iterator[int]] = {}

    def choose(self: AutoLength) -> None:
        self.limit = next(turns.setdefault(self, cycle(lengths)))

    monkeypatch.setattr(AutoLength, "_choose", choose)


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
        {"strategy": "lenient", "lenience": 1.0},
        {"strategy": "typical", "posterior_threshold": math.inf},
        {"strategy": "ensemble", "assistant_ensemble_weight": 1.0},
    ],
    ids=str,
)
def test_outputs_are_distributed_as_the_target_s_own(toy_pair, fast_rounds, settings: dict) -> None:
    decoding = SpeculativeDecoding(toy_pair[1], num_assistant_tokens=2, **settings)
    assert min(odds(toy_pair, decoding, temperature=1.4, top_p=0.8, cache_implementation="static")) > FALSE_FAILURE
    assert fast_rounds


@pytest.mark.parametrize("settings", [{}, {"verification": "block"}], ids=str)
def test_outputs_of_bursts_are_too(toy_pair, fast_rounds, monkeypatch, settings: dict) -> None:
    """Their draws are independent of one another and of the verdict's."""
    monkeypatch.setattr(engine, "BURST", 1)
    parts = []
    run_draft = Engine.run_draft

    def counted(self: Engine, *args):
        drafts, count = run_draft(self, *args)
        parts.append(count)
        return drafts, count

    monkeypatch.setattr(Engine, "run_draft", counted)
    decoding = SpeculativeDecoding(toy_pair[1], num_assistant_tokens=2, entropy_threshold=0.1, **settings)
    assert min(odds(toy_pair, decoding, temperature=1.4, cache_implementation="static")) > FALSE_FAILURE
    assert max(parts) == 2
    assert fast_rounds


@pytest.mark.parametrize("settings", [{}, {"verification": "block"}, {"entropy_threshold": 0.6}], ids=str)
def test_outputs_of_rounds_of_uneven_lengths_are_too(toy_pair, fast_rounds, monkeypatch, settings: dict) -> None:
    """Where a draft catches up with a plain round, and at the length that was prepared in a call before."""
    choose_in_turn(monkeypatch, 2, 0, first=0)
    decoding = SpeculativeDecoding(toy_pair[1], num_assistant_tokens="auto", **settings)
    assert min(odds(toy_pair, decoding, temperature=1.4, cache_implementation="static")) > FALSE_FAILURE
    assert decoding.stats is not None
    assert [r.draft_steps for r in decoding.stats.rounds][:2] == [0, 2]
    assert fast_rounds


def test_control_one_uniform_number_for_all_draws_fails(toy_pair, fast_rounds, monkeypatch) -> None:
    """Draws that are not independent are found."""
    monkeypatch.setattr("hf_specdec.rules.sampling.draw", lambda weights, uniform: draw(weights, uniform * 0 + 0.5))
    decoding = SpeculativeDecoding(toy_pair[1], num_assistant_tokens=2)
    assert max(odds(toy_pair, decoding, cache_implementation="static")) < FALSE_FAILURE
    assert fast_rounds


def test_statistics_are_those_of_the_general_rounds(fast_rounds) -> None:
    target, draft = pair("llama")
    settings = {**prompts(4), **GREEDY, "assistant_model": draft, "return_dict_in_generate": True}
    # A threshold between the extremes: some of this pair's drafts stop at once, some never.
    stopped = {"generation_strategy": "speculative", "entropy_threshold": 0.2}
    relaxed = ({"generation_strategy": name} for name in ("bild", "lenient", "typical", "ensemble"))
    for strategy in ({"generation_strategy": "speculative"}, *relaxed, stopped):
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


VARIANTS = [
    {},
    {"entropy_threshold": 0.2},
    {"generation_strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.1},
]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_auto_gives_plain_tokens_in_prepared_rounds(batch_size: int, fast_rounds, monkeypatch) -> None:
    """By the lengths that it finds itself; what would be compiled runs as it is."""
    monkeypatch.setattr(cuda_graphs, "prepare", lambda step, device, name, *, compile: step)
    target, draft = pair("llama")
    settings = {**GREEDY, "assistant_model": draft, "num_assistant_tokens": "auto", "compile": True}
    for variant in VARIANTS:
        for length, seed in ((11, 10), (19, 3), (9, 4)):
            inputs = prompts(batch_size, length, seed)
            plain = target.generate(**inputs, **GREEDY, generation_strategy=None)
            fast_rounds.clear()
            out = target.generate(**inputs, **settings, **variant, return_dict_in_generate=True)
            assert torch.equal(out.sequences, plain)
            assert len(fast_rounds) == len(out.speculation.rounds)
            assert set(fast_rounds[0].engine.steps) <= set(PREPARED_LENGTHS)


@pytest.mark.parametrize(
    ("family", "variant", "ends", "looks"),
    pairwise(("llama", "mistral-sliding", "gpt2"), VARIANTS, ({}, {"eos_token_id": None}), (True, False)),
    ids=str,
)
def test_rounds_of_all_lengths_draft_what_the_general_ones_do(
    family: str, variant: dict, ends: dict, looks: bool, fast_rounds, monkeypatch
) -> None:
    """After rounds without drafts, ragged rows catch up: a cache that misses or mixes up tokens drafts others.

    Drafts that may stop come in bursts on a CPU; on an accelerator nothing looks at them in between.
    """
    if not looks:
        monkeypatch.setattr(engine, "burst_of", lambda lookahead: lookahead)
    choose_in_turn(monkeypatch, 4, 0, 0, 8, 1, 0, 0, 0, 16, 2, 2, 0)
    target, draft = pair(family, noise=0.05)
    settings = {"max_new_tokens": 48, "do_sample": False, "assistant_model": draft, "num_assistant_tokens": "auto"}
    for batch_size in (1, 4):
        call = {**prompts(batch_size), **settings, **variant, **ends, "return_dict_in_generate": True}
        general, fast = (target.generate(**call, cache_implementation=kind) for kind in ("dynamic", "static"))
        assert torch.equal(general.sequences, fast.sequences)
        for name in ("drafted", "accepted", "new_tokens"):
            one, other = ([getattr(r, name) for r in out.speculation.rounds] for out in (general, fast))
            assert one == other
        lengths = [r.draft_steps for r in fast.speculation.rounds]
        assert {0, 1, 4} <= set(lengths) and max(lengths) >= 8
        widths = [r.width for r in fast.speculation.rounds]
        assert widths == [11 + lengths[0], *(n + 1 for n in lengths[1:])]
        assert 0 < fast.speculation.acceptance_rate < 1
    assert len(fast_rounds) > 10


@pytest.mark.parametrize("batch_size", [1, 4])
def test_drafting_ends_with_the_burst_in_which_the_last_row_stops(batch_size: int, fast_rounds) -> None:
    target, draft = pair("llama", noise=0.05)
    call = {**prompts(batch_size), "max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    settings = {"assistant_model": draft, "num_assistant_tokens": 12, "entropy_threshold": 0.2}
    plain = target.generate(**call, generation_strategy=None).sequences
    out = target.generate(**call, **settings, cache_implementation="static")
    assert torch.equal(out.sequences, plain)
    steps = [r.draft_steps for r in out.speculation.rounds[:-1]]
    assert steps == [4 * -(-max(r.drafted) // 4) for r in out.speculation.rounds[:-1]]
    assert len(set(steps)) > 1


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_target_as_its_own_draft_is_accepted_at_all_lengths(
    batch_size: int, first: int, fast_rounds, monkeypatch
) -> None:
    """Also where it reads its prompt late, and where a row ends long before the others' drafts catch up."""
    choose_in_turn(monkeypatch, *[0] * 20, 8, 2, 0, 4, first=first)
    target, _ = pair("llama")
    inputs, settings = prompts(batch_size, 8), {"max_new_tokens": 60, "do_sample": False}
    free = target.generate(**inputs, **settings, eos_token_id=None, generation_strategy=None)
    settings["eos_token_id"] = int(free[-1, 12])
    plain = target.generate(**inputs, **settings, generation_strategy=None)
    out = target.generate(
        **inputs, **settings, assistant_model=target, num_assistant_tokens="auto", cache_implementation="static",
        return_dict_in_generate=True,
    )  # fmt: skip
    rounds = out.speculation.rounds
    assert torch.equal(out.sequences, plain)
    assert all(r.accepted == r.drafted for r in rounds)
    if batch_size > 1:
        assert {0, 2, 4, 8} <= {r.draft_steps for r in rounds}
        assert any(r.new_tokens[-1] == 0 and r.catch_up_seconds > 0 for r in rounds)


def test_only_what_is_unread_is_caught_up_with(fast_rounds, monkeypatch) -> None:
    """Its time is told apart; a draft step reads the last two tokens by itself."""
    choose_in_turn(monkeypatch, 4, 4, 0, 2, 0, 0, 2)
    target, draft = pair("llama", noise=0.0)
    settings = {**GREEDY, "max_new_tokens": 21, "eos_token_id": None, "return_dict_in_generate": True}
    out = target.generate(
        **prompts(1), **settings, assistant_model=draft, num_assistant_tokens="auto", cache_implementation="static"
    )
    # Each of these drafts is accepted, and its last token not read.
    rounds = [(r.draft_steps, r.catch_up_seconds > 0) for r in out.speculation.rounds]
    assert rounds == [
        (1, True), (4, False), (4, False), (0, False), (2, True), (0, False), (0, False), (2, True),
    ]  # fmt: skip
    assert all(r.catch_up_seconds <= r.draft_seconds for r in out.speculation.rounds)


def test_preparing_is_no_part_of_a_round(fast_rounds, monkeypatch) -> None:
    """By a clock that goes on at each look, and a thousandfold where steps are prepared or run for the first time."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    def slow(step, device, name, *, compile):
        runs = [0]

        def run(*args):
            runs[0] += 1
            now[0] += 1000.0 * (runs[0] == 1)
            return step(*args)

        return run

    for module in (lap_timer, prepared_decoder):
        monkeypatch.setattr(module, "perf_counter", clock)
    monkeypatch.setattr(cuda_graphs, "prepare", slow)
    choose_in_turn(monkeypatch, 4, 0, 2)
    target, draft = pair("llama")
    out = target.generate(
        **prompts(1), **GREEDY, assistant_model=draft, num_assistant_tokens="auto", cache_implementation="static",
        return_dict_in_generate=True,
    )  # fmt: skip
    # Two steps of three lengths, and one of plain rounds.
    assert now[0] > 7000.0
    assert {0, 1, 2, 4} == {r.draft_steps for r in out.speculation.rounds}
    assert max(r.seconds for r in out.speculation.rounds) < 10.0


def test_lengths_of_auto_share_an_engine_and_are_prepared_once(fast_rounds, monkeypatch) -> None:
    made: list[int] = []
    prepare = Engine.prepare
    monkeypatch.setattr(Engine, "prepare", lambda self, n: (made.append(n), prepare(self, n))[1])
    target, draft = pair("llama")
    settings = {**GREEDY, "eos_token_id": None, "assistant_model": draft, "cache_implementation": "static"}
    for first in (1, 4, 0):
        choose_in_turn(monkeypatch, 2, 0, 4, first=first)
        target.generate(**prompts(2), **settings, num_assistant_tokens="auto")
    assert sorted(made) == [0, 1, 2, 4]
    assert len(kept_engines(target, compile=False)) == 1
    target.generate(**prompts(2), **settings, num_assistant_tokens="auto", entropy_threshold=0.5)
    assert len(kept_engines(target, compile=False)) == 2


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
    assert len(kept_engines(target, compile=False)) == KEPT_ENGINES
    assert not kept_engines(copy.deepcopy(target), compile=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"output_scores": True, "return_dict_in_generate": True},
        {"drafter": "hybrid"},
        {"use_cache": False},
        {"input_ids": torch.tensor([[5]]), "attention_mask": torch.tensor([[1]])},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_needs_the_general_round_gets_it(fast_rounds, settings: dict) -> None:
    target, draft = pair("llama")
    call = {**prompts(1), **GREEDY, **settings}
    speculative = target.generate(**call, assistant_model=draft, compile=True)
    plain = target.generate(**{k: v for k, v in call.items() if k != "drafter"}, generation_strategy=None)
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


@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_failed_compilation_is_told_once_and_general_rounds_go_on(fails_at: int, fast_rounds, monkeypatch) -> None:
    """Whether it fails for the first round or for one in the middle."""
    prepare, prepared = Engine.prepare, []

    def failing(self: Engine, lookahead: int) -> None:
        prepared.append(lookahead)
        if len(prepared) > fails_at:
            raise RuntimeError("no compiler here")
        prepare(self, lookahead)

    monkeypatch.setattr(Engine, "prepare", failing)
    monkeypatch.setattr(cuda_graphs, "prepare", lambda step, device, name, *, compile: step)
    choose_in_turn(monkeypatch, 2, 4, 0, 1)
    target, draft = pair("llama")
    settings = {**GREEDY, "assistant_model": draft, "num_assistant_tokens": "auto", "cache_implementation": "static"}
    plain = target.generate(**prompts(3), **GREEDY, generation_strategy=None)
    with pytest.warns(UserWarning, match="no compiler here"):
        out = target.generate(**prompts(3), **settings)
    assert torch.equal(out, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(target.generate(**prompts(3), **settings), plain)
    assert len(prepared) == fails_at + 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_compiled_tokens_are_plain_ones_and_later_calls_compile_nothing(dtype: torch.dtype, monkeypatch) -> None:
    """The one test that compiles: drafting of the first token and of later ones, and verification."""
    compiled = []
    code = compiled_step._compile
    monkeypatch.setattr(compiled_step, "_compile", lambda *args: (compiled.append(1), code(*args))[1])
    target, draft = pair("llama", dtype=dtype)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        for length, seed in ((11, 1), (6, 2), (40, 3), (11, 4)):
            inputs = prompts(2, length, seed)
            out = target.generate(**inputs, **GREEDY, num_assistant_tokens=2, compile=True)
            assert torch.equal(out, target.generate(**inputs, **GREEDY, generation_strategy=None))
            compiled.append(0)
    assert sum(compiled) <= 3 and not any(compiled[-3:])
    # Another process finds the code on disk.
    hf_specdec.release()
    compiled_step._codes.clear()
    counters.clear()
    compiled.clear()
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        assert torch.equal(target.generate(**inputs, **GREEDY, num_assistant_tokens=2, compile=True), out)
    found = counters["inductor"]
    assert found["fxgraph_cache_hit"] == sum(compiled) > 0
    assert not found["fxgraph_cache_miss"] and not found["fxgraph_cache_bypass"]


def test_calls_of_similar_length_share_a_capacity_that_wastes_little() -> None:
    sizes = [prepared_capacity(tokens) for tokens in range(1, 4097)]
    assert sizes == sorted(sizes) and sizes[0] == 128 and sizes[-1] == 4096
    assert all(tokens <= size for tokens, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * tokens for tokens, size in enumerate(sizes, 1) if tokens > 512)
    assert len(set(sizes)) == 16


@pytest.mark.parametrize("model", ["target", "draft"])
def test_models_with_hooks_and_rows_without_a_token_get_no_prepared_rounds(model: str, monkeypatch) -> None:
    """A replay would call no hook, and the last prompt token of a masked row would see itself."""
    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    plans: list[object] = []
    plan_for = prepared_decoder.plan_for
    monkeypatch.setattr(prepared_decoder, "plan_for", lambda *args: plans.append(plan_for(*args)) or plans[-1])
    target, draft = pair("llama")
    inputs, settings = prompts(2), {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}

    def speculate() -> torch.Tensor:
        with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
            return target.generate(**inputs, **settings, cache_implementation="static")

    assert torch.equal(speculate(), target.generate(**inputs, **settings))
    hooked = {"target": target, "draft": draft}[model]
    handle = hooked.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    assert torch.equal(speculate(), target.generate(**inputs, **settings))
    handle.remove()
    inputs["attention_mask"][1] = 0
    assert torch.equal(speculate(), target.generate(**inputs, **settings))
    assert [plan is None for plan in plans] == [False, True, True]
