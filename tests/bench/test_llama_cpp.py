"""llama.cpp on the weights of models in memory: the same logits, the same tokens, and the draft's acceptance."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hf_specdec import SpeculativeDecoding
from hf_specdec.bench.models import synthetic

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install 'hf_specdec[llama-cpp]'")
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'hf_specdec[llama-cpp]'")

from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models import gguf_export
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.models.precision import quantize_made
from hf_specdec.bench.records import Model
from hf_specdec.bench.running.llama_cpp import Copies, Rows, decode, decode_with_draft
from hf_specdec.bench.running.llama_cpp_methods import llama_cpp_methods, llama_cpp_refusal
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.tasks.engines import compared, llama_cpp_legend

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip


def random_model(family: str):
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.bias.normal_()
    return model


def loaded(model, folder: Path, weights: str = "f32") -> Rows:
    path = folder / f"{id(model)}-{weights}.gguf"
    gguf_export.write_gguf(model, path, weights)
    return Rows(path, weights, threads=1)


def logits_after(rows: Rows, token_ids: list[int]) -> torch.Tensor:
    rows.prepare(1, 64)
    rows.feed([token_ids])
    return torch.stack([torch.tensor(rows.logits(place)) for place in range(len(token_ids))])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("weights", "tolerance"), [("f32", 1e-4), ("bf16", 0.05), ("q8_0", 0.05)])
def test_logits_are_those_of_the_model(family: str, weights: str, tolerance: float, tmp_path) -> None:
    model, ids = random_model(family), torch.randint(512, (1, 20)).tolist()
    found = logits_after(loaded(model, tmp_path, weights), ids[0])
    expected = model(torch.tensor(ids)).logits[0]
    assert (found - expected).norm() < tolerance * expected.norm()


def test_quantized_weights_are_written_as_what_they_stand_for(tmp_path) -> None:
    model, ids = random_model("llama"), torch.randint(512, (1, 20)).tolist()
    wide = model(torch.tensor(ids)).logits[0]
    quantize_made(model, "int8")
    found, expected = logits_after(loaded(model, tmp_path), ids[0]), model(torch.tensor(ids)).logits[0]
    assert (found - expected).norm() < 1e-4 * expected.norm() < (wide - expected).norm()


def test_the_comparison_would_notice_unturned_queries(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gguf_export, "_as_llama_cpp_has_it", lambda model, name, parameter: parameter.detach())
    model, ids = random_model("llama"), torch.randint(512, (1, 20)).tolist()
    found = logits_after(loaded(model, tmp_path), ids[0])
    expected = model(torch.tensor(ids)).logits[0]
    assert (found - expected).norm() > 0.2 * expected.norm()


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen2"])
@pytest.mark.parametrize("weights", ["f32", "bf16", "q8_0"])
def test_tokens_are_generates(shape: str, weights: str, tmp_path) -> None:
    spec = synthetic.parse(f"synthetic:{shape}:alpha=0.7")
    target, draft, _ = synthetic.build(spec, CPU, torch.float32, CPU, torch.float32)
    ids = torch.randint(2048, (3, 20), generator=torch.Generator().manual_seed(0))
    expected = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[:, 20:]
    fast, small = loaded(target, tmp_path, weights), loaded(draft, tmp_path, weights)
    assert decode(fast, ids.tolist(), 40).tokens == expected.tolist()
    done = decode_with_draft(fast, small, ids.tolist(), 40, lookahead=4)
    assert done.tokens == expected.tolist()


def test_random_models_decode_alike_and_any_draft_may_be_wrong(tmp_path) -> None:
    target = random_model("llama")
    torch.manual_seed(1)
    draft = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    ids = torch.randint(512, (1, 20))
    expected = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[:, 20:]
    fast = loaded(target, tmp_path)
    for small, share in ((loaded(draft, tmp_path), 0.1), (loaded(target, tmp_path), 1)):
        done = decode_with_draft(fast, small, ids.tolist(), 40, lookahead=3)
        assert done.tokens == expected.tolist()
        assert abs(sum(map(sum, done.accepted)) / sum(map(sum, done.drafted)) - share) <= 0.1


def test_rounds_are_those_of_our_own_loop(tmp_path) -> None:
    spec = synthetic.parse("synthetic:tiny-llama:alpha=0.7")
    target, draft, _ = synthetic.build(spec, CPU, torch.float32, CPU, torch.float32)
    ids = torch.randint(2048, (2, 20))
    ours = SpeculativeDecoding(draft, num_assistant_tokens=4)
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
    target.generate(ids, custom_generate=ours, **kwargs)
    calls = []
    done = decode_with_draft(loaded(target, tmp_path), loaded(draft, tmp_path), ids.tolist(), 40, 4, calls.append)
    assert done.new_tokens == [list(item.new_tokens) for item in ours.stats.rounds]
    assert done.accepted == [list(item.accepted) for item in ours.stats.rounds]
    assert [[len(row) for row in rows] for rows in calls] == done.new_tokens


def test_what_can_not_be_written_is_refused(tmp_path) -> None:
    model = random_model("llama")
    model.config.rope_parameters["rope_type"] = "yarn"
    with pytest.raises(ValueError, match="not 'yarn' ones"):
        gguf_export.write_gguf(model, tmp_path / "x.gguf", "f32")
    model.config.model_type = "opt"
    with pytest.raises(ValueError, match="families llama, qwen2, not opt"):
        gguf_export.write_gguf(model, tmp_path / "x.gguf", "f32")


def synthetic_pair(**settings):
    return load_pair(Settings(model_name="synthetic:tiny-llama:alpha=0.7", assisted_generation=True, **settings))


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_of_the_task_engines_decode_and_count_as_ours(batch: int) -> None:
    pair = synthetic_pair()
    settings = Settings(task="engines", max_new_tokens=30)
    prompts = benchmark_prompts(pair, (20,), batch, 30)
    plain_row, drafting = llama_cpp_methods(pair, "llama.cpp-f32", [4])
    ours = next(m for m in compared(Settings(task="engines"), pair) if m.name == "speculative, γ = 4, recorded")
    calls = {m.name: timed_call(m, prompts, settings) for m in (plain(pair), plain_row, drafting, ours)}
    tokens = [call.tokens for call in calls.values()]
    assert tokens[1:] == tokens[:-1] and calls[plain_row.name].rounds == 0
    theirs, expected = calls[drafting.name], calls[ours.name]
    assert (theirs.new_tokens, theirs.accepted, theirs.drafted) == (
        expected.new_tokens,
        expected.accepted,
        expected.drafted,
    )
    for call in calls.values():
        assert 0 < call.first_seconds < call.seconds


def test_synthetic_pairs_are_compared_with_llama_cpp_where_asked() -> None:
    pair = synthetic_pair()
    settings = Settings(task="engines", engines=("recorded", "llama.cpp-q8_0"), grid={"num_assistant_tokens": (3,)})
    rows = [one.method for one in compared(settings, pair)]
    found = [(row.name, row.same_engine, row.lookahead) for row in rows if row.kind == "llama.cpp"]
    assert found == [
        ("none llama.cpp-q8_0", "none llama.cpp-q8_0", None),
        ("speculative, γ = 3, llama.cpp-q8_0", "none llama.cpp-q8_0", 3),
    ]
    assert {row.role for row in rows} == {None, "fixed", "auto", "plain"}
    assert not {"ensemble", "lookup"} & {row.kind for row in rows}


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"do_sample": True}, "greedy decoding only"), ({"model_name": "synthetic:tiny-opt"}, "llama, qwen2, not opt")],
)
def test_where_llama_cpp_can_not_take_part_the_report_says_why(changes: dict, words: str) -> None:
    settings = Settings(**{"model_name": "synthetic:tiny-llama", "engines": ("llama.cpp-f32",), **changes})
    pair = load_pair(replace(settings, assisted_generation=True))
    assert words in str(llama_cpp_refusal(settings, pair))
    assert all(method.method.kind != "llama.cpp" for method in compared(settings, pair))
    assert llama_cpp_refusal(replace(settings, engines=("recorded",)), pair) is None


@pytest.mark.parametrize(("dtype", "synthetic_pair", "said"), [
    ("int8 weights, float32", None, True), ("int8 weights, float32", "a sentence", False), ("float32", None, False),
])  # fmt: skip
def test_a_head_wider_than_q8_0_s_is_said(dtype: str, synthetic_pair: str | None, said: bool) -> None:
    target = Model("big", "Llama", 100, dtype, "cpu", "sdpa", synthetic_pair)
    assert ("output head" in llama_cpp_legend(target)) is said


def test_copies_in_place_of_a_draft(tmp_path) -> None:
    """What followed the first place of the last two tokens; the output is that of plain decoding."""
    assert Copies.after([1, 2, 3, 4, 1, 2], 2) == [3, 4]
    assert Copies.after([1, 2, 3], 2) == [] and Copies.after([1, 1], 0) == []
    rows, prompts = loaded(random_model("llama"), tmp_path), [[5, 6, 7, 8, 5, 6]]
    copied = decode_with_draft(rows, Copies(), prompts, 12, lookahead=4)
    assert copied.drafted[0] == [4] and copied.tokens == decode(rows, prompts, 12).tokens
