"""The task `engines`: every method on each engine and batch size, its bare passes, and what memory allows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from helpers.interpreted_steps import interpret_compiled_steps
from helpers.tiny_pair import CONTEXT, save_pair
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from hf_specdec.bench.figures import bandwidth, passes
from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.reports.rendering import render
from hf_specdec.bench.reports.tables import engines as engines_table
from hf_specdec.bench.running import warming
from hf_specdec.bench.running.bare_passes import BarePasses, keeping_engines, widths_for
from hf_specdec.bench.running.methods_by_task import of_engines
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.running.transformers_methods import SCHEDULES
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage.results import load
from hf_specdec.bench.tasks import benchmark, engines
from hf_specdec.lengths.auto_length import AutoLength
from hf_specdec.prepared import compiled_step, cuda_graphs, few_token_products

FILE = "engines-target-draft-greedy.json.gz"
ALONE = {"assisted", "ensemble", "lookup"}


@pytest.fixture(scope="module")
def settings(saved_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Settings:
    target, draft = map(str, saved_pair)
    return Settings(
        task="engines", model_name=target, assistant_model=draft, assisted_generation=True, max_new_tokens=12,
        prompt_lengths=(30,), batch_sizes=(1, 2), limit=2, repeats=2, engines=("eager", "static"),
        grid={"num_assistant_tokens": (2, 3)}, output_dir=tmp_path_factory.mktemp("engines"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair(settings: Settings) -> LoadedPair:
    return load_pair(settings)


@pytest.fixture(scope="module")
def result(settings: Settings) -> dict[str, Any]:
    engines.run_engines(settings)
    return load(settings.output_dir / FILE)


def test_every_method_decodes_plain_tokens_at_every_batch_size(result: dict[str, Any]) -> None:
    plain = {call.prompts: call.tokens for call in result["calls"] if call.method == "plain"}
    lossy = {method["name"] for method in result["methods"] if method["kind"] == "ensemble"}
    assert len(lossy) == 1
    for call in result["calls"]:
        assert [len(row) for row in call.tokens] == [12] * call.batch
        assert call.method in lossy or call.tokens == plain[call.prompts], call.method
        if call.rounds is not None:
            assert [sum(row) for row in zip(*call.rounds.new_tokens, strict=True)] == [12] * call.batch


def test_methods_take_turns_and_transformers_own_run_one_row_only(result: dict[str, Any]) -> None:
    kinds = {method["name"]: method["kind"] for method in result["methods"]}
    assert Counter(kinds.values())["assisted"] == len(SCHEDULES)
    for batch, groups in ((1, {(0,), (1,)}), (2, {(0, 1)})):
        calls = [call for call in result["calls"] if call.batch == batch]
        assert {call.prompts for call in calls} == groups
        alone = {name for name, kind in kinds.items() if kind in ALONE or name == "floor"}
        expected = set(kinds) if batch == 1 else set(kinds) - alone
        for group in groups:
            for repeat in (0, 1):
                turn = [call for call in calls if (call.prompts, call.repeat) == (group, repeat)]
                assert {call.method for call in turn} == expected
                positions = [call.position for call in turn]
                assert sorted(positions) == list(range(min(positions), min(positions) + len(expected)))


def test_every_method_of_ours_has_plain_decoding_on_its_engine_beside_it(result: dict[str, Any]) -> None:
    kinds = {method["name"]: (method["kind"], method["engine"]) for method in result["methods"]}
    for method in result["methods"]:
        ours = method["kind"] == "speculative"
        assert method["kind"] != "none" or method["same_engine"] in (None, method["name"])
        assert not ours or kinds[method["same_engine"]] == ("none", method["engine"])


def test_every_warm_up_is_kept(result: dict[str, Any]) -> None:
    warmed = {(item["method"], item["batch"]): item for item in result["cold"]}
    assert warmed.keys() == {(call.method, call.batch) for call in result["calls"]}
    assert all(2 <= len(item["seconds"]) <= warming.MOST_WARM_UPS for item in warmed.values())
    assert set(result["loading_seconds"]) == {result["models"][role]["name"] for role in ("target", "draft")}


def test_bare_passes_are_timed_on_the_engines_of_the_methods(result: dict[str, Any]) -> None:
    assert {(item["engine"], item["batch"]) for item in result["passes"]} == {
        (engine, batch) for engine in ("generate", "eager", "static") for batch in (1, 2)
    }
    for engine in ("generate", "eager", "static"):
        (costs,) = passes.costs(result, engine, 1).values()
        assert costs.draft and set(costs.target) >= {1, 3, 4}
        samples = [item["times"] for item in result["passes"] if (item["engine"], item["batch"]) == (engine, 1)]
        assert costs.target[3] == pytest.approx(median(s for times in samples for s in times["target"]["3"]))


def test_what_passes_allow_is_told_by_passes_of_the_calls_own_length(result: dict[str, Any]) -> None:
    slow = {"draft": {"1": [1.0]}, "target": {"1": [1.0], "40": [40.0]}}
    more = result | {
        "passes": [*({**item, "length": 1, "times": slow} for item in result["passes"]), *result["passes"]]
    }
    assert set(passes.costs(more, "eager", 1)) == {1, *passes.costs(result, "eager", 1)}
    assert engines_table.allowed_table(more) == engines_table.allowed_table(result)
    only = {**result, "passes": more["passes"][: len(result["passes"])]}
    assert engines_table.allowed_table(only) != engines_table.allowed_table(result), "the control"


def test_memory_is_read_after_each_plain_call_of_one_row(result: dict[str, Any]) -> None:
    plain = {method["name"] for method in result["methods"] if method["kind"] in ("plain", "none")}
    calls = {(c.method, c.prompts, c.repeat) for c in result["calls"] if c.method in plain and c.batch == 1}
    read = [(r["method"], tuple(r["prompts"]), r["repeat"]) for r in result["readings"]]
    assert len(plain) == 3 and len(read) == len(set(read)) and set(read) == calls
    assert all(bandwidth.share(result, method) > 0 for method in plain)
    assert all(reading["bytes_per_second"] > 1e8 for reading in result["readings"])


def test_widths_reach_as_far_as_drafts(settings: Settings, pair: LoadedPair) -> None:
    methods = of_engines(settings, pair)
    widths = widths_for(methods)
    assert widths[0] == 1 and widths[-1] == max(method.longest for method in methods) + 1 and {3, 4} <= set(widths)


def test_rendering_needs_the_file_only(settings: Settings, result: dict[str, Any]) -> None:
    path = settings.output_dir / FILE.replace(".json.gz", ".md")
    assert render(result) == path.read_text()


def test_a_run_that_was_broken_off_goes_on(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, measured = Counter[str](), list[str]()
    real = warming.timed_call

    def counted(pair: Any, method: Any, *args: Any, **place: Any) -> Any:
        made[method.name] += 1
        if place:  # else it warms up
            measured.append(method.name)
        if len(measured) == 5:
            measured.append("interrupted")
            raise KeyboardInterrupt
        return real(pair, method, *args, **place)

    monkeypatch.setattr(warming, "timed_call", counted)
    short = replace(settings, repeats=1, batch_sizes=(1,), limit=1, max_new_tokens=4, output_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        engines.run_engines(short)
    first, finished = dict(made), measured[:4]
    engines.run_engines(short)
    result = load(tmp_path / FILE)
    assert len(result["calls"]) == len(result["methods"]) == len({call.method for call in result["calls"]})
    assert all(made[name] == first[name] for name in finished), "neither warmed up nor called again"
    assert not list(tmp_path.glob("*.sqlite"))


def test_sampling_draws_as_many_tokens(settings: Settings, pair: LoadedPair) -> None:
    drawn = replace(settings, do_sample=True, top_k=0)
    prompts = benchmark_prompts(pair, (30,), 2, 12)
    for method in of_engines(drawn, pair):
        call = timed_call(pair, method, prompts[: method.most_rows], drawn)
        assert all(len(row) == 12 for row in call.tokens)
    by_block = {m.engine for m in of_engines(drawn, pair) if m.options.get("verification") == "block"}
    assert by_block == set(drawn.engines)
    assert not any("verification" in method.options for method in of_engines(settings, pair))


def test_encoder_decoder_pairs(tmp_path: Path, settings: Settings) -> None:
    target, draft = save_pair(tmp_path, encoder_decoder=True)
    asked = replace(settings, model_name=str(target), assistant_model=str(draft))
    pair = load_pair(asked)
    prompts = benchmark_prompts(pair, (30,), 2, 12)
    methods = {method.name: method for method in of_engines(asked, pair)}
    calls = [timed_call(pair, methods[name], prompts, asked) for name in ("plain", "speculative, γ = 2, eager")]
    assert calls[0].tokens == calls[1].tokens
    for engine in ("generate", "eager", "static"):
        times = BarePasses(pair, 12, [1, 3]).sample(engine, prompts)
        assert times is not None and set(times["target"]) == {"1", "3"}
    assert BarePasses(pair, 12, [1, 3]).sample("compiled", prompts) is None, "nothing was compiled for them"
    assert bandwidth.describe(pair, 30)["cache_bytes"] is None


@pytest.mark.compiles
def test_calls_whose_rounds_are_not_compiled_have_bare_passes_of_their_own(
    settings: Settings, pair: LoadedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `compile=True` these run in the kernels; those of the compiled baseline say nothing about drafts."""
    interpret_compiled_steps(monkeypatch)
    benchmark.run_benchmark(
        replace(
            settings, task="benchmark", drafter="hybrid", compile=True, num_assistant_tokens=2, batch_sizes=(1,),
            engines=(), grid={}, output_dir=tmp_path,
        )
    )  # fmt: skip
    (file,) = tmp_path.glob("*.json.gz")
    found = load(file)
    assert {method["engine"] for method in found["methods"]} == {"generate", "kernels", "compiled"}
    costs = passes.costs(found, "kernels")[30]
    assert set(costs.draft) == {1} and {1, 3} <= set(costs.target)
    eta = passes.efficiency(found, [call for call in found["calls"] if call.method == "speculative"])
    assert eta is not None and 0 < eta < 2
    assert "drafter hybrid, kernels" in render(found)
    used: list[torch.Tensor] = []
    linear = few_token_products._linear
    monkeypatch.setattr(few_token_products, "_linear", lambda *given: used.append(given[0]) or linear(*given))
    prompts = benchmark_prompts(pair, (30,), 1, 12)
    for engine in ("static", "kernels"):
        assert not used
        assert BarePasses(pair, 12, [1, 3]).sample(engine, prompts) is not None
    assert used


def test_bare_passes_leave_the_cache_as_it_was(pair: LoadedPair) -> None:
    """So that every sample meets the same context: a hundred passes of the widest would not fit into it."""
    prompts = benchmark_prompts(pair, (CONTEXT - 20,), 1, 12)
    for engine in ("generate", "eager"):
        bare = BarePasses(pair, 12, [1, 5])
        for _ in range(5):
            assert bare.sample(engine, prompts) is not None


def test_bytes_that_a_step_reads(pair: LoadedPair) -> None:
    target = pair.target
    config = target.config
    total = sum(p.numel() for p in target.parameters()) - config.vocab_size * config.hidden_size
    assert not config.tie_word_embeddings
    assert bandwidth.weight_bytes(target) == 8 * total
    assert bandwidth.cache_bytes(target, 10) == 8 * 10 * 2 * config.num_hidden_layers * config.hidden_size
    assert bandwidth.read_rate(torch.device("cpu"), 2**16) > 0


def test_bytes_of_tables_and_experts() -> None:
    """Of positions a step reads a row, of a tied table all; which experts it reads depends on the text."""
    tied = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    table = tied.transformer.wpe.weight
    assert bandwidth.weight_bytes(tied) == sum(p.nbytes for p in tied.parameters()) - table.nbytes
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    experts = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    assert bandwidth.weight_bytes(experts) is None


def test_prepared_steps_are_timed_for_their_own_batch_size(
    settings: Settings, pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What would be compiled runs as it is, which takes no minute.
    monkeypatch.setattr(compiled_step, "compile_refusal", lambda device: None)
    monkeypatch.setattr(cuda_graphs, "prepare", lambda step, *about, **how: step)
    lengths = cycle((0, 4))
    monkeypatch.setattr(AutoLength, "_choose", lambda self: setattr(self, "limit", next(lengths)))
    asked = replace(settings, engines=("compiled",))
    prompts = benchmark_prompts(pair, (30,), 2, 12)
    bare = BarePasses(pair, 12, [1, 3])
    assert bare.sample("compiled", prompts) is None
    with keeping_engines(9, pair.target.device):
        methods = [m for m in of_engines(asked, pair) if m.kind == "none" or m.facts.get("role") in ("fixed", "auto")]
        calls = [timed_call(pair, method, prompts, asked) for method in methods]
        times = bare.sample("compiled", prompts)
        assert bare.sample("compiled", prompts[:1]) is None
        longer = BarePasses(pair, 150, [1, 3])
        assert longer.sample("compiled", prompts) is None, "another size of the caches"
    assert len(calls) == 4 and all(call.tokens == calls[0].tokens for call in calls)
    assert times is not None
    # Those of auto are 1, at first, and then 0 and 4.
    assert (set(times["draft"]), set(times["target"])) == ({"1", "2", "3", "4"}, {"1", "2", "3", "4", "5"})
