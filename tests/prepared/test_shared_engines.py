"""Which calls get prepared rounds, and which share an engine with earlier ones."""

import copy
import sys
import warnings

import pytest
import torch
from helpers.families import FAMILIES, ROWS_FAMILIES, pair, prompts
from helpers.identity import speculated
from helpers.memory import resident
from helpers.patches import choose_in_turn, interpret_compiled_steps, noted, returned

import hf_specdec
from hf_specdec.models.cache_names import cache_of
from hf_specdec.models.static_cache import zeros
from hf_specdec.prepared import compiled_step, cuda_graphs, engine_store, few_token_products, lap_timer, prepared_rounds
from hf_specdec.prepared.engine import SPARE, Engine, prepared_capacity
from hf_specdec.prepared.engine_store import kept_engines

GREEDY = {"max_new_tokens": 16, "do_sample": False}


def test_preparing_is_no_part_of_a_round(fast_rounds, monkeypatch) -> None:
    """By a clock that goes on at each look, and a thousandfold where steps are prepared or run for the first time."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    def slow(step, *about, **how):
        runs = [0]

        def run(*args):
            runs[0] += 1
            now[0] += 1000.0 * (runs[0] == 1)
            return step(*args)

        return run

    for module in (lap_timer, prepared_rounds):
        monkeypatch.setattr(module, "perf_counter", clock)
    monkeypatch.setattr(cuda_graphs, "prepare", slow)
    choose_in_turn(monkeypatch, 4, 0, 2)
    target, draft = pair("llama")
    out = target.generate(
        **prompts(1), **GREEDY, assistant_model=draft, num_assistant_tokens="auto", cache_implementation="static",
        return_dict_in_generate=True,
    )  # fmt: skip
    # Two steps of three lengths, and one of plain rounds.
    assert now[0] > 7000.0 and {0, 1, 2, 4} == {r.draft_steps for r in out.speculation.rounds}
    assert max(r.seconds for r in out.speculation.rounds) < 10.0


def test_lengths_of_auto_share_an_engine_and_are_prepared_once(fast_rounds, monkeypatch) -> None:
    made = noted(monkeypatch, Engine, "prepare", lambda self, length: length)
    target, draft = pair("llama")
    settings = {**GREEDY, "eos_token_id": None, "assistant_model": draft, "cache_implementation": "static"}
    for first in (1, 4, 0):
        choose_in_turn(monkeypatch, 2, 0, 4, first=first)
        target.generate(**prompts(2), **settings, num_assistant_tokens="auto")
    assert sorted(made) == [0, 1, 2, 4] and len(kept_engines(target, compile=False)) == 1
    target.generate(**prompts(2), **settings, num_assistant_tokens="auto", entropy_threshold=0.5)
    assert len(kept_engines(target, compile=False)) == 2


def test_later_calls_see_nothing_of_earlier_ones(fast_rounds) -> None:
    """One engine serves texts of other lengths and paddings, and a returned cache is the caller's own."""
    target, draft = pair("gpt2")
    settings = {**GREEDY, "assistant_model": draft, "cache_implementation": "static"}
    first = target.generate(**prompts(3), **settings, return_dict_in_generate=True)
    kept = cache_of(first).layers[0].keys.clone()
    for length, seed in ((7, 3), (20, 4), (9, 5)):
        inputs = prompts(3, length, seed)
        plain = target.generate(**inputs, **GREEDY, generation_strategy=None)
        assert torch.equal(target.generate(**inputs, **settings), plain)
    assert len({id(decoder.engine) for decoder in fast_rounds}) == 1
    assert torch.equal(cache_of(first).layers[0].keys, kept)


def test_calls_in_and_out_of_inference_mode_share_an_engine(fast_rounds) -> None:
    target, draft = pair("llama")
    settings = {**prompts(2), **GREEDY, "assistant_model": draft, "cache_implementation": "static"}
    plain = target.generate(**prompts(2), **GREEDY, generation_strategy=None)
    with torch.inference_mode():
        assert torch.equal(target.generate(**settings), plain)
    assert torch.equal(target.generate(**settings), plain)
    assert len({id(decoder.engine) for decoder in fast_rounds}) == 1


def test_captured_steps_are_not_replayed_with_other_weights(fast_rounds) -> None:
    """They read the memory that they were captured over."""
    target, draft = pair("llama")
    settings = {**prompts(1), **GREEDY, "assistant_model": draft, "cache_implementation": "static"}
    target.generate(**settings)
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.flip(0))
    assert torch.equal(target.generate(**settings), target.generate(**prompts(1), **GREEDY, generation_strategy=None))
    assert len(kept_engines(target, compile=False)) == 2
    assert not kept_engines(copy.deepcopy(target), compile=False)


def test_of_many_engines_those_used_longest_ago_are_dropped(fast_rounds, monkeypatch) -> None:
    """Whether they have buffers of their own or share them."""
    monkeypatch.setattr(engine_store, "KEPT_ENGINES", 3)
    target, draft = pair("llama")
    settings = {**GREEDY, "assistant_model": draft, "cache_implementation": "static"}
    for rows, lookahead in ((1, 1), (1, 2), (2, 1), (1, 1), (2, 2), (3, 1)):
        target.generate(**prompts(rows), **settings, num_assistant_tokens=lookahead)
    kept = {(len(engine.state), engine.plan.lookahead) for engine in kept_engines(target, compile=False)}
    assert kept == {(1, 1), (2, 2), (3, 1)}


@pytest.mark.parametrize("settings", [
    {"repetition_penalty": 1.5},
    {"output_scores": True, "return_dict_in_generate": True},
    {"use_cache": False},
    {"input_ids": torch.tensor([[5]]), "attention_mask": torch.tensor([[1]])},
], ids=lambda settings: next(iter(settings)))  # fmt: skip
def test_what_needs_the_general_round_gets_it(fast_rounds, settings: dict) -> None:
    target, draft = pair("llama")
    call = {**prompts(1), **GREEDY, **settings}
    speculative = target.generate(**call, assistant_model=draft, compile=True)
    plain = target.generate(**call, generation_strategy=None)
    if "output_scores" in settings:
        speculative, plain = speculative.sequences, plain.sequences
    assert torch.equal(speculative, plain) and not fast_rounds


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ROWS_FAMILIES])
def test_compile_is_no_error_where_it_cannot_be(family: str) -> None:
    target, draft = pair(family)
    out = speculated(target, draft, **prompts(1), **GREEDY, compile=True)
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
    monkeypatch.setattr(cuda_graphs, "prepare", lambda step, *about, **how: step)
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


@pytest.mark.parametrize("fails_at", [0, 2])
def test_on_a_gpu_what_can_not_be_compiled_is_captured(fails_at: int, fast_rounds, monkeypatch) -> None:
    """Told once, in the first round or in one in the middle; later calls don't try again."""
    compiled: list[str] = []

    def prepare(step, device, name, *about, compile, **how):
        if compile:
            compiled.append(name)
            if len(compiled) > fails_at:
                raise RuntimeError("no compiler here")
        return step

    monkeypatch.setattr(compiled_step, "compile_refusal", lambda device: None)
    monkeypatch.setattr(compiled_step, "supported", lambda: False)
    monkeypatch.setattr(cuda_graphs, "prepare", prepare)
    monkeypatch.setattr(compiled_step, "_compiled", lambda step, *about: step)
    choose_in_turn(monkeypatch, 2, 4, 0, 1)
    target, draft = pair("llama")
    settings = {**GREEDY, "assistant_model": draft, "num_assistant_tokens": "auto", "compile": True}
    plain = target.generate(**prompts(3), **GREEDY, generation_strategy=None)
    with pytest.warns(UserWarning, match="no compiler here") as told:
        assert torch.equal(target.generate(**prompts(3), **settings), plain)
    assert len(told) == 1
    rounds = len(fast_rounds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(target.generate(**prompts(3), **settings), plain)
    assert len(fast_rounds) > rounds and len(compiled) == fails_at + 1
    (kept,) = kept_engines(target, compile=False)
    assert not kept.failed and set(kept.steps) >= {0, 2, 4}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0+cpu", "2.13.0a0+git1f", "3.0.0"])
def test_on_a_cpu_an_older_torch_does_not_compile(version: str, device: str, monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    refused = compiled_step.compile_refusal(torch.device(device))
    assert (refused is None) == (device == "cuda" or version >= "2.13")


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=str)
def test_where_torch_is_too_old_a_call_says_so_once_and_decodes_without(cache: dict, monkeypatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("inductor or an engine was begun")

    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    for module, name in ((compiled_step, "_inductor"), (compiled_step, "_start_inductor"), (Engine, "__init__")):
        monkeypatch.setattr(module, name, never)
    target, draft = pair("llama")
    plain = target.generate(**prompts(3), **GREEDY)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        for _ in range(2):
            with pytest.warns(UserWarning) as caught:
                out = target.generate(**prompts(3), **GREEDY, **cache, compile=True)
            said = [str(warning.message) for warning in caught]
            assert said == [
                "compile=True needs torch 2.13 on a CPU, and torch 2.12.1+cpu is installed: decoding goes on without."
            ]
            assert torch.equal(out, plain)


@pytest.mark.parametrize("error", [NameError, RuntimeError, KeyboardInterrupt])
def test_what_goes_wrong_beside_inductors_thread_waits_for_it(error: type, fast_rounds, monkeypatch) -> None:
    """And is tried once more where the thread may be the reason."""
    prepare, done = Engine.prepare, []

    def failing(self: Engine, lookahead: int) -> None:
        done.append("tried")
        if done.count("tried") == 1:
            raise error("module is not installed as a submodule")
        prepare(self, lookahead)

    monkeypatch.setattr(Engine, "prepare", failing)
    for module in (prepared_rounds, compiled_step):
        monkeypatch.setattr(module, "settle", lambda: done.append("settled"))
    monkeypatch.setattr(cuda_graphs, "prepare", lambda step, *about, **how: step)
    target, draft = pair("llama")
    settings = {**GREEDY, "assistant_model": draft, "cache_implementation": "static"}
    plain = target.generate(**prompts(3), **GREEDY, generation_strategy=None)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            target.generate(**prompts(3), **settings)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error" if error is NameError else "ignore")
            assert torch.equal(target.generate(**prompts(3), **settings), plain)
    assert done[:3] == ["tried", "settled", "tried"] if error is NameError else done == ["tried", "settled"]


@pytest.mark.parametrize("error", [NameError, KeyboardInterrupt])
def test_a_draft_whose_compiling_was_interrupted_is_compiled_by_the_next_call(error: type, monkeypatch) -> None:
    interpret_compiled_steps(monkeypatch)
    compiled, interrupted = [], []
    code = compiled_step._compiled

    def once(step, args, device, name, lent):
        if not interrupted:
            interrupted.append(name)
            raise error("in the middle")
        compiled.append(name)
        return code(step, args, device, name, lent)

    monkeypatch.setattr(compiled_step, "_compiled", once)
    target, draft = pair("llama")
    settings = {**GREEDY, "assistant_model": draft, "compile": True, "num_assistant_tokens": 3}
    plain = target.generate(**prompts(3), **GREEDY)
    with hf_specdec.enable(target, generation_strategy="speculative"):
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                target.generate(**prompts(3), **settings)
        assert torch.equal(target.generate(**prompts(3), **settings), plain)
    assert interrupted == compiled[:1] and compiled[1:] == ["draft step", "verification of 3 tokens"]


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_compiled_tokens_are_plain_ones_and_later_calls_compile_nothing(dtype: torch.dtype, monkeypatch) -> None:
    """The one test that compiles: drafting of the first token and of later ones, and verification, for all lengths."""
    compiled = noted(monkeypatch, compiled_step, "_compile", lambda *_: 1)
    target, draft = pair("llama", dtype=dtype)
    target.config.max_position_embeddings = draft.config.max_position_embeddings = 700
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        for length, seed in ((11, 1), (6, 2), (600, 3), (11, 4)):
            inputs = prompts(2, length, seed)
            out = target.generate(**inputs, **GREEDY, num_assistant_tokens=2, compile=True)
            assert torch.equal(out, target.generate(**inputs, **GREEDY, generation_strategy=None))
            compiled.append(0)
    assert sum(compiled) <= 3 and not any(compiled[-3:])
    hf_specdec.release()
    compiled_step._codes.clear()
    assert torch.equal(speculated(target, draft, **inputs, **GREEDY, num_assistant_tokens=2, compile=True), out)
    assert not any(compiled[-3:]), "another process finds the code on disk"


def test_calls_share_a_capacity_and_where_attention_reads_all_of_it_little_is_wasted(monkeypatch) -> None:
    sizes = [prepared_capacity(tokens) for tokens in range(1, 4097)]
    assert sizes == sorted(sizes) and sizes[0] == 128 and sizes[-1] == 4096
    assert all(tokens <= size for tokens, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * tokens for tokens, size in enumerate(sizes, 1) if tokens > 512)
    assert len(set(sizes)) == 16
    models = pair("llama")
    monkeypatch.setattr(few_token_products, "supported", lambda: True)
    models[0].config.max_position_embeddings = 5000
    assert {prepared_capacity(tokens, *models) for tokens in range(1, 5001)} == {5000 + SPARE}
    models[1].config.max_position_embeddings = 100_000
    assert {prepared_capacity(tokens, *models) for tokens in (1, 8192, 8193, 65536)} == {8192, 65536}
    models[1].config._attn_implementation = "eager"
    assert prepared_capacity(200, *models) == prepared_capacity(200)


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells of a process's memory")
def test_a_cache_takes_the_memory_of_the_slots_that_are_written() -> None:
    before = resident()
    cache = zeros((1, 4, 100_000, 64), torch.zeros(1))
    cache[:, :, :1000] = 1
    assert resident() - before < cache.nbytes / 20 and cache[:, :, 1000:1100].count_nonzero() == 0
    cache[:] = 1
    assert resident() - before > cache.nbytes * 0.9, "the negative control: all slots are written"


@pytest.mark.parametrize("model", ["target", "draft"])
def test_models_with_hooks_and_rows_without_a_token_get_no_prepared_rounds(model: str, monkeypatch) -> None:
    """A replay would call no hook, and the last prompt token of a masked row would see itself."""
    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    plans = returned(monkeypatch, prepared_rounds, "plan_for")
    target, draft = pair("llama")
    inputs, settings = prompts(2), {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}

    def speculate() -> torch.Tensor:
        return speculated(target, draft, **inputs, **settings, cache_implementation="static")

    assert torch.equal(speculate(), target.generate(**inputs, **settings))
    hooked = {"target": target, "draft": draft}[model]
    handle = hooked.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    assert torch.equal(speculate(), target.generate(**inputs, **settings))
    handle.remove()
    inputs["attention_mask"][1] = 0
    assert torch.equal(speculate(), target.generate(**inputs, **settings))
    assert [plan is None for plan in plans] == [False, True, True]
