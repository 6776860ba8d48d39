"""The task `engines`: every method on each engine and batch size, its bare passes, and what memory allows."""

import importlib.util
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from helpers.eagle_drafts import stored
from helpers.own_drafters import lend, needs_own_drafters, target_and_block_draft, target_with_mtp
from helpers.tiny_pair import CONTEXT, VOCABULARY, save_pair, tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from hf_specdec.bench.figures import passes
from hf_specdec.bench.figures.frames import whole
from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.models.precision import quantized_layers
from hf_specdec.bench.records import Call, Pass, Result
from hf_specdec.bench.results import document, load
from hf_specdec.bench.running import bare_passes, memory, warming
from hf_specdec.bench.running.bare_passes import BarePasses, keeping_engines, widths_for
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.running.transformers_methods import SCHEDULES, own_drafts
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import engines, run_task
from hf_specdec.bench.tasks.engines import compared
from hf_specdec.lengths.auto_length import AutoLength
from hf_specdec.models.recorded_passes import trials_of
from hf_specdec.prepared import compiled_step, cuda_graphs

FILE = "engines-target-draft-greedy.json.gz"
ALONE = {"assisted", "ensemble", "lookup"}


@pytest.fixture(scope="module")
def settings(saved_pair: tuple[Path, Path], tmp_path_factory) -> Settings:
    target, draft = map(str, saved_pair)
    return Settings(
        task="engines", model_name=target, assistant_model=draft, assisted_generation=True, max_new_tokens=12,
        prompt_lengths=(30,), batch_sizes=(1, 2), limit=2, repeats=2, engines=("recorded", "static"),
        grid={"num_assistant_tokens": (2, 3)}, output_dir=tmp_path_factory.mktemp("engines"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair(settings: Settings) -> LoadedPair:
    return load_pair(settings)


@pytest.fixture(scope="module")
def result(settings: Settings) -> Result:
    run_task(settings)
    return load(settings.output_dir / FILE)


def test_quantized_weights_are_compared_with_float32_where_memory_has_room(settings: Settings, monkeypatch) -> None:
    quantized = replace(settings, precision="int8")
    pair = load_pair(quantized)
    (wide,) = (one for one in compared(quantized, pair) if one.name == "plain float32")
    assert quantized_layers(pair.target) and not quantized_layers(wide.pair.target)
    assert wide.pair.target.dtype == torch.float32
    assert "plain float32" not in {one.name for one in compared(settings, load_pair(settings))}
    monkeypatch.setattr(memory, "has_room", lambda size: False)
    assert "plain float32" not in {one.name for one in compared(quantized, pair)}


def test_every_method_decodes_plain_tokens_at_every_batch_size(result: Result) -> None:
    plain = {call.prompts: call.outputs for call in result.calls if call.method == "plain"}
    lossy = {method.name for method in result.methods if method.kind == "ensemble"}
    assert len(lossy) == 1
    for call in result.calls:
        assert call.new_tokens == 12 * len(call.prompts) and call.peak_bytes
        assert call.method in lossy or call.outputs == plain[call.prompts], call.method


def test_methods_take_turns_and_transformers_own_run_one_row_only(result: Result) -> None:
    kinds = {method.name: method.kind for method in result.methods}
    assert Counter(kinds.values())["assisted"] == len(SCHEDULES)
    for batch, groups in ((1, {(0,), (1,)}), (2, {(0, 1)})):
        calls = [call for call in result.calls if len(call.prompts) == batch]
        assert {call.prompts for call in calls} == groups
        alone = {name for name, kind in kinds.items() if kind in ALONE or name == "floor"}
        expected = set(kinds) if batch == 1 else set(kinds) - alone
        for group in groups:
            for repeat in (0, 1):
                turn = [call for call in calls if (call.prompts, call.repeat) == (group, repeat)]
                assert {call.method for call in turn} == expected
                positions = [call.position for call in turn]
                assert sorted(positions) == list(range(min(positions), min(positions) + len(expected)))


def test_every_method_of_ours_has_plain_decoding_on_its_engine_beside_it(result: Result) -> None:
    kinds = {method.name: (method.kind, method.engine) for method in result.methods}
    for method in result.methods:
        assert method.kind != "speculative" or kinds[str(method.same_engine)] == ("none", method.engine)


def test_every_warm_up_is_kept(result: Result) -> None:
    warmed = {(item.method, item.batch): item for item in result.cold}
    assert warmed.keys() == {(call.method, len(call.prompts)) for call in result.calls}
    assert all(2 <= len(item.seconds) <= warming.MOST_WARM_UPS for item in warmed.values())
    assert set(result.loading_seconds) == {result.models[role].name for role in ("target", "draft")}


def test_bare_passes_are_timed_on_the_engines_of_the_methods(result: Result) -> None:
    assert {(item.engine, len(item.prompts)) for item in result.passes} == {
        (engine, batch) for engine in ("generate", "recorded", "static") for batch in (1, 2)
    }
    for engine in ("generate", "recorded", "static"):
        (costs,) = passes.costs(result, engine, 1).values()
        assert costs.draft and set(costs.target) >= {1, 3, 4}
        mine = [one for one in result.passes if (one.engine, len(one.prompts)) == (engine, 1)]
        samples = [one.seconds for one in mine if (one.role, one.tokens) == ("target", 3)]
        assert costs.target[3] == pytest.approx(median(samples))


def test_costs_are_those_of_passes_of_the_calls_own_length(result: Result) -> None:
    timed = [("draft", 1, 1.0), ("target", 1, 1.0), ("target", 40, 40.0)]
    slow = [
        Pass(engine, one.draft, one.prompts, 0, 1, *about)
        for engine, one in {(one.engine, one.prompts): one for one in result.passes}.items()
        for engine in [one.engine]
        for about in timed
    ]
    more, only = replace(result, passes=[*slow, *result.passes]), replace(result, passes=slow)
    assert set(passes.costs(more, "recorded", 1)) == {1, *passes.costs(result, "recorded", 1)}
    fixed = [method for method in result.methods if method.role == "fixed"]
    found = [[passes.costs_of(whole(one), method) for method in fixed] for one in (result, more, only)]
    assert found[0] == found[1] != found[2], "the last is the control"


def test_memory_is_read_after_each_plain_call_of_one_row(result: Result) -> None:
    plain = [method for method in result.methods if method.kind in ("plain", "none")]
    names = {method.name for method in plain}
    assert len(names) == 3
    for call in result.calls:
        read = call.method in names and len(call.prompts) == 1
        assert (call.read_rate is not None) == read and (not read or (call.read_rate or 0) > 1e8)
    assert all((passes.bandwidth_share(whole(result), method) or 0) > 0 for method in plain)


def test_widths_reach_as_far_as_drafts(settings: Settings, pair: LoadedPair) -> None:
    methods = compared(settings, pair)
    widths = widths_for(methods)
    assert widths[0] == 1 and widths[-1] == max(method.longest for method in methods) + 1 and {3, 4} <= set(widths)


def test_rendering_needs_the_file_only(settings: Settings, result: Result) -> None:
    path = settings.output_dir / FILE.replace(".json.gz", ".md")
    assert document(result, path.stem, engines.render)[0] == path.read_text()


def test_a_run_that_was_broken_off_goes_on(settings: Settings, tmp_path, monkeypatch) -> None:
    made, measured = Counter[str](), list[str]()
    real = warming.timed_call

    def counted(method: Any, *args: Any, **place: Any) -> Any:
        made[method.name] += 1
        if place:  # else it warms up
            measured.append(method.name)
        if len(measured) == 5:
            measured.append("interrupted")
            raise KeyboardInterrupt
        return real(method, *args, **place)

    monkeypatch.setattr(warming, "timed_call", counted)
    short = replace(settings, repeats=1, batch_sizes=(1,), limit=1, max_new_tokens=4, output_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_task(short)
    first, finished = dict(made), measured[:4]
    run_task(short)
    result = load(tmp_path / FILE)
    assert len(result.calls) == len(result.methods) == len({call.method for call in result.calls})
    assert all(made[name] == first[name] for name in finished), "neither warmed up nor called again"
    assert not list(tmp_path.glob("*.jsonl"))


def test_sampling_draws_as_many_tokens(settings: Settings, pair: LoadedPair) -> None:
    drawn = replace(settings, do_sample=True, top_k=0)
    prompts = benchmark_prompts(pair, (30,), 2, 12)
    for method in compared(drawn, pair):
        call = timed_call(method, prompts[: method.most_rows], drawn)
        assert all(len(row) == 12 for row in call.tokens)
    by_block = {m.method.engine for m in compared(drawn, pair) if m.options.get("verification") == "block"}
    assert by_block == set(drawn.engines)
    assert not any("verification" in method.options for method in compared(settings, pair))


def test_nothing_is_recorded_on_the_engine_eager(settings: Settings) -> None:
    pair = load_pair(settings)
    prompts = benchmark_prompts(pair, (30,), 2, 12)
    tokens = []
    for engine in ("eager", "recorded"):
        asked = replace(settings, engines=(engine,), max_new_tokens=40)
        for method in (one for one in compared(asked, pair) if one.method.role == "fixed"):
            assert method.method.engine == engine and method.method.same_engine == f"none {engine}"
            tokens += [timed_call(method, prompts, asked).tokens for _ in range(2)]
        assert BarePasses(pair, 12, [1, 3]).sample(engine, prompts)
        assert any(map(trials_of, pair.models)) == (engine == "recorded")
    assert all(one == tokens[0] for one in tokens)


def test_encoder_decoder_pairs(tmp_path, settings: Settings, monkeypatch) -> None:
    """Their passes are not compiled, but use the compiled kernels, and so do their bare passes."""
    target, draft = save_pair(tmp_path, encoder_decoder=True)
    asked = replace(settings, model_name=str(target), assistant_model=str(draft))
    pair = load_pair(asked)
    prompts = benchmark_prompts(pair, (30,), 2, 12)
    methods = {method.name: method for method in compared(asked, pair)}
    calls = [timed_call(methods[name], prompts, asked) for name in ("plain", "speculative, γ = 2, recorded")]
    assert calls[0].tokens == calls[1].tokens
    users: list[Any] = []
    monkeypatch.setattr(bare_passes, "pass_kernels", lambda model: users.append(model) or nullcontext)
    for engine in ("generate", "recorded", "static", "compiled"):
        times = BarePasses(pair, 12, [1, 3]).sample(engine, prompts)
        assert {tokens for role, tokens, _ in times if role == "target"} == {1, 3}
        assert users == ([pair.target, pair.draft] if engine == "compiled" else [])
    assert memory.describe(pair, 30).cache_bytes is None


def test_bare_passes_leave_the_cache_as_it_was(pair: LoadedPair) -> None:
    """So that every sample meets the same context: a hundred passes of the widest would not fit into it."""
    prompts = benchmark_prompts(pair, (CONTEXT - 20,), 1, 12)
    for engine in ("generate", "recorded"):
        bare = BarePasses(pair, 12, [1, 5])
        for _ in range(5):
            assert bare.sample(engine, prompts)


def test_bytes_that_a_step_reads(pair: LoadedPair) -> None:
    target = pair.target
    config = target.config
    total = sum(p.numel() for p in target.parameters()) - config.vocab_size * config.hidden_size
    assert not config.tie_word_embeddings and memory.weight_bytes(target) == 8 * total
    assert memory.cache_bytes(target, 10) == 8 * 10 * 2 * config.num_hidden_layers * config.hidden_size
    assert memory.read_rate(torch.device("cpu"), 2**16) > 0


def test_bytes_of_tables_and_experts() -> None:
    """Of positions a step reads a row, of a tied table all; which experts it reads depends on the text."""
    tied = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    table = tied.transformer.wpe.weight
    assert memory.weight_bytes(tied) == sum(p.nbytes for p in tied.parameters()) - table.nbytes
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    experts = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    assert memory.weight_bytes(experts) is None


def test_prepared_steps_are_timed_for_their_own_batch_size(settings: Settings, pair: LoadedPair, monkeypatch) -> None:
    # What would be compiled runs as it is, which takes no minute.
    monkeypatch.setattr(compiled_step, "compile_refusal", lambda device: None)
    monkeypatch.setattr(cuda_graphs, "prepare", lambda step, *about, **how: step)
    lengths = cycle((0, 4))
    monkeypatch.setattr(AutoLength, "_choose", lambda self: setattr(self, "limit", next(lengths)))
    asked = replace(settings, engines=("compiled",))
    prompts = benchmark_prompts(pair, (30,), 2, 12)
    bare = BarePasses(pair, 12, [1, 3])
    assert not bare.sample("compiled", prompts)
    with keeping_engines(9, pair.target.device):
        methods = [m for m in compared(asked, pair) if m.method.kind == "none" or m.method.role in ("fixed", "auto")]
        calls = [timed_call(method, prompts, asked) for method in methods]
        times = bare.sample("compiled", prompts)
        assert not bare.sample("compiled", prompts[:1])
    assert len(calls) == 4 and all(call.tokens == calls[0].tokens for call in calls)
    # Those of auto are 1, at first, and then 0 and 4.
    found = {role: {tokens for one, tokens, _ in times if one == role} for role in ("draft", "target")}
    assert found == {"draft": {1, 2, 3, 4}, "target": {1, 2, 3, 4, 5}}


@pytest.mark.parametrize("missing", ["llama_cpp", "gguf"])
def test_a_missing_package_of_llama_cpp_is_named_with_the_extra(missing: str, tmp_path, monkeypatch) -> None:
    """Before any work."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    asked = Settings(task="engines", model_name="none", engines=("recorded", "llama.cpp-q8_0"), output_dir=tmp_path)
    words = rf"'llama.cpp-q8_0' needs {missing}, .* pip install 'hf_specdec\[llama-cpp\]'"
    with pytest.raises(BenchError, match=words):
        run_task(asked)


SETTINGS = {"task": "engines", "assisted_generation": True, "max_new_tokens": 12, "batch_sizes": (1, 2),
            "engines": ("recorded",)}  # fmt: skip


def called(settings: Settings, pair: LoadedPair) -> dict[str, Call]:
    """One call of each method, for one row."""
    (prompt,) = benchmark_prompts(pair, (20,), 1, 12)
    return {one.method.name: timed_call(one, [prompt], settings) for one in compared(settings, pair)}


def stored_target(folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """With its tokenizer, as `folder/target`; and a DFlash draft for it."""
    target, draft = target_and_block_draft("LlamaForCausalLM", vocab_size=VOCABULARY)
    target.generation_config.pad_token_id = 0
    target.save_pretrained(folder / "target")
    tokenizer().save_pretrained(folder / "target")
    return target, draft


@needs_own_drafters
def test_the_layers_draft_in_both_loops(monkeypatch, tmp_path) -> None:
    target, mtp = target_with_mtp("Glm4MoeForCausalLM", 2, vocab_size=VOCABULARY)
    lend(monkeypatch, target, mtp)
    target.generation_config.pad_token_id = 0
    pair = LoadedPair("with layers", target, tokenizer())
    asked = Settings(model_name="with layers", drafter="mtp", grid={"num_assistant_tokens": (2,)}, output_dir=tmp_path,
                     **SETTINGS)  # fmt: skip
    assert not asked.uses_draft
    calls = called(asked, pair)
    for name in ("use_mtp", "drafter mtp, speculative, γ = 2, recorded"):
        assert calls[name].tokens == calls["plain"].tokens
        assert len(calls[name].steps) - 1 == 2, "passes of layers in a round"
    recurrent, _ = target_with_mtp("Qwen3_5ForCausalLM", 1)
    assert not own_drafts(asked, replace(pair, target=recurrent))
    with pytest.raises(BenchError, match=r"has no num_mtp_layers.*choose another drafter"):
        own_drafts(asked, replace(pair, target=target_and_block_draft("LlamaForCausalLM")[0]))


@needs_own_drafters
@pytest.mark.parametrize("kind", ["dflash", "eagle"])
def test_a_stored_draft_is_loaded_and_drafts(kind: str, tmp_path) -> None:
    """In both loops where transformers has one for it."""
    target, blocks = stored_target(tmp_path)
    if kind == "dflash":
        blocks.save_pretrained(tmp_path / kind)
    else:
        stored(tmp_path / kind, target, range(VOCABULARY // 2))
    drafter = "dflash" if kind == "dflash" else None
    asked = Settings(model_name=str(tmp_path / "target"), assistant_model=str(tmp_path / kind), dtype="float64",
                     drafter=drafter, grid={"num_assistant_tokens": (3,)}, output_dir=tmp_path, **SETTINGS)  # fmt: skip
    calls = called(asked, load_pair(asked))
    ours = calls[f"{'drafter dflash, ' if drafter else ''}speculative, γ = 3, recorded"]
    assert ours.tokens == calls["plain"].tokens and len(ours.steps) > 1
    if drafter:
        assert calls["dflash"].tokens == calls["plain"].tokens
        with pytest.raises(BenchError, match="is a DFlash draft; add"):
            load_pair(replace(asked, drafter=None))
    else:
        assert not [name for name in calls if "assisted" in name or "ensemble" in name]
    with pytest.raises(BenchError, match="not a DFlash draft; leave out"):
        other = {"assistant_model": asked.model_name} if drafter else {"drafter": "dflash"}
        load_pair(replace(asked, **other))
