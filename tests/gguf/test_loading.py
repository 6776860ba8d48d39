"""Models whose weights stay in a GGUF file: the tokens of an ordinary model with the same numbers."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gguf_blocks import HALVES, write_blocks
from helpers.patches import interpret_compiled_steps
from helpers.streamer import Streamer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast, pipeline

import hf_specdec
from hf_specdec import SpeculativeDecoding, load_gguf
from hf_specdec.gguf import loading, weights
from hf_specdec.gguf.architectures import MODEL_TYPES
from hf_specdec.gguf.weights import GgufWeight
from hf_specdec.models import recorded_passes
from hf_specdec.prepared import compiled_step, few_token_products

Files = dict[str, tuple[Path, PreTrainedModel]]
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
PROMPT = torch.arange(2, 22)[None]
BATCH = {
    "input_ids": torch.stack([torch.arange(2, 12), torch.arange(30, 40)]),
    "attention_mask": torch.tensor([[1] * 10, [0] * 4 + [1] * 6]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    folder = tmp_path_factory.mktemp("gguf")
    made = {}
    for name, kinds, seed in (("target", ("Q4_1", "Q8_0"), 0), ("draft", ("Q4_0", "Q4_1"), 99)):
        made[name] = folder / f"{name}.gguf", write_blocks(folder / f"{name}.gguf", "llama", kinds, seed).double()
    return made


@pytest.mark.parametrize("architecture", MODEL_TYPES)
@pytest.mark.parametrize("kinds", [(*HALVES, "F32"), ("F32",)], ids=["blocks", "floats"])
def test_families(architecture: str, kinds: tuple[str, ...], tmp_path) -> None:
    asked = write_blocks(tmp_path / "model.gguf", architecture, kinds).double()
    model = load_gguf(tmp_path / "model.gguf", dtype=torch.float64)
    assert type(model) is type(asked) and not model.training
    assert any(isinstance(weight, GgufWeight) for weight in model.parameters()) is ("Q4_0" in kinds)
    torch.testing.assert_close(model(PROMPT).logits, asked(PROMPT).logits, rtol=0, atol=1e-9)
    assert torch.equal(model.generate(PROMPT, **GREEDY), asked.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_a_file_of_short_floats_is_held_as_it_is(kind: str, tmp_path) -> None:
    asked = write_blocks(tmp_path / "model.gguf", "qwen2", (kind,))
    model = load_gguf(tmp_path / "model.gguf")
    assert model.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    for (name, found), weight in zip(model.named_parameters(), asked.parameters(), strict=True):
        torch.testing.assert_close(found.float(), weight, rtol=0, atol=0 if weight.dim() > 1 else 0.01, msg=name)


def test_blocks_are_the_file_s(files: Files) -> None:
    """But for queries and keys, whose rows lie in another order."""
    path, _ = files["target"]
    model = load_gguf(path)
    held = {name: weight.blocks.untyped_storage() for name, weight in model.named_parameters() if weight.dim() > 1}
    mapped = {name for name, storage in held.items() if storage.nbytes() == path.stat().st_size}
    assert held.keys() - mapped == {name for name in held if "q_proj" in name or "k_proj" in name}
    assert len({held[name].data_ptr() for name in mapped}) == 1


def test_a_shared_head_is_one_matrix(tmp_path) -> None:
    asked = write_blocks(tmp_path / "model.gguf", "gemma3", ("Q8_0",))
    model = load_gguf(tmp_path / "model.gguf")
    assert asked.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    model.dequantize()
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("inputs", [{"input_ids": PROMPT}, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
@pytest.mark.parametrize("blocks", ["target", "draft", "both"])
def test_speculation_gives_the_target_s_tokens(
    blocks: str, kernels: bool, inputs: dict[str, Any], files: Files, monkeypatch
) -> None:
    if not kernels:
        monkeypatch.setattr(weights, "_has_kernels", lambda dtype: False)
    (target_file, asked), (draft_file, draft) = files["target"], files["draft"]
    target = load_gguf(target_file, dtype=torch.float64) if blocks != "draft" else asked
    draft = load_gguf(draft_file, dtype=torch.float64) if blocks != "target" else draft
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=3)
    found = target.generate(**inputs, **GREEDY, custom_generate=decoding)
    assert torch.equal(found, asked.generate(**inputs, **GREEDY))


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "no kernels"])
def test_passes_are_recorded_where_there_are_kernels(kernels: bool, files: Files, monkeypatch) -> None:
    """In float32, so that a single operation in another order would show."""
    if not kernels:
        monkeypatch.setattr(weights, "_has_kernels", lambda dtype: False)
    replays: list[int] = []
    replay, decoding = recorded_passes.replay, SpeculativeDecoding(load_gguf(files["draft"][0]), num_assistant_tokens=3)
    monkeypatch.setattr(recorded_passes, "replay", lambda made, inputs: replays.append(1) or replay(made, inputs))
    settings = {**GREEDY, "custom_generate": decoding, "return_dict_in_generate": True, "output_logits": True}
    found = []
    for passes in (10**9, 1):
        assert not replays
        monkeypatch.setattr(recorded_passes, "EAGER_PASSES", passes)
        found.append(load_gguf(files["target"][0]).generate(PROMPT, **settings))
    assert bool(replays) == kernels and torch.equal(found[0].sequences, found[1].sequences)
    assert torch.equal(torch.stack(found[0].logits), torch.stack(found[1].logits))


@pytest.mark.compiles
@pytest.mark.parametrize("inputs", [{"input_ids": PROMPT}, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("options", [{"assistant": True}, {"drafter": "none"}, {"drafter": "suffix"}], ids=str)
def test_compiled_rounds(options: dict[str, Any], inputs: dict[str, Any], files: Files, monkeypatch) -> None:
    interpret_compiled_steps(monkeypatch)
    monkeypatch.setattr(compiled_step, "supported", few_token_products.supported)
    target, draft = (load_gguf(files[name][0], dtype=torch.float64) for name in ("target", "draft"))
    assistant, rest = (draft, {}) if "assistant" in options else (None, options)
    decoding = SpeculativeDecoding(assistant, num_assistant_tokens=3, compile=True, **rest)
    asked = files["target"][1].generate(**inputs, **GREEDY)
    assert torch.equal(target.generate(**inputs, **GREEDY, custom_generate=decoding), asked)


def test_sampling_with_equal_draws(files: Files) -> None:
    path, asked = files["target"]
    model, answers = load_gguf(path, dtype=torch.float64), []
    for target in (asked, model):
        torch.manual_seed(0)
        decoding = SpeculativeDecoding(files["draft"][1], num_assistant_tokens=3)
        answers.append(target.generate(PROMPT, max_new_tokens=12, do_sample=True, custom_generate=decoding))
    assert torch.equal(*answers)


def test_enable_and_streaming(files: Files) -> None:
    path, asked = files["target"]
    model, streamer = load_gguf(path, dtype=torch.float64), Streamer()
    with hf_specdec.enable():
        draft = load_gguf(files["draft"][0], dtype=torch.float64)
        found = model.generate(PROMPT, **GREEDY, assistant_model=draft, streamer=streamer)
    *streamed, end = streamer.calls
    assert torch.equal(found, asked.generate(PROMPT, **GREEDY)) and end == "end"
    assert torch.equal(torch.cat([torch.tensor(tokens).flatten() for tokens in streamed]), found[0])


def test_saving_is_refused_until_weights_are_widened(files: Files, tmp_path) -> None:
    path, asked = files["target"]
    model = load_gguf(path)
    with pytest.raises(ValueError, match=r"copy that file, or call model\.dequantize\(\)"):
        model.save_pretrained(tmp_path)
    assert model.dequantize() is model and not any(isinstance(weight, GgufWeight) for weight in model.parameters())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(PROMPT).logits, asked.float()(PROMPT).logits, rtol=0, atol=1e-3)
    asked.double()


def test_a_configuration_of_the_caller_s(tmp_path) -> None:
    asked = write_blocks(tmp_path / "model.gguf", "llama", ("Q8_0",))
    model = load_gguf(tmp_path / "model.gguf", config=asked.config)
    torch.testing.assert_close(model(PROMPT).logits, asked(PROMPT).logits, rtol=0, atol=1e-3)


def _changed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new, 1)

    return change


def _kind(number: int) -> Callable[[bytes], bytes]:
    """Of the first tensor of the file."""

    def change(content: bytes) -> bytes:
        at = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
        return content[:at] + struct.pack("<I", number) + content[at + 4 :]

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda content: content[:-100], "ends before .* does: it is truncated"),
        (lambda content: content[:1000], "header can't be read"),
        (lambda content: b"GGML" + content[4:], "not a GGUF file"),
        (lambda content: content[:4] + b"\7" + content[5:], "version 7"),
        (lambda content: content[:8] + b"\xff" * 7 + content[15:], "header can't be read"),
        (_changed(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"mamba"), "architecture 'mamba'"),
        (_changed(b"blk.1.attn_v.weight", b"blk.1.attn_x.weight"), "attn_x.weight, which has no place"),
        (_changed(b"blk.1.attn_v.weight", b"blk.1.attn_v.weighs"), "holds nothing for .*1.self_attn.v_proj"),
        (_changed(b"output_norm.weight", b"rope_freqs_.weight"), "config="),
        (_changed(b"llama.block_count", b"llama.block_cound"), "block_count"),
        (_kind(16), "IQ2_XXS"),
        (_kind(20), "IQ4_NL; load_gguf supports"),
        (_kind(77), "type 77"),
    ],
    ids=[
        "truncated", "header only", "no GGUF", "version", "counts", "architecture", "unknown tensor", "unknown kind",
        "rope", "metadata", "blocks of other sizes", "unknown blocks", "unknown to gguf",
    ],
)  # fmt: skip
def test_refusals(change: Callable[[bytes], bytes], match: str, files: Files, tmp_path, monkeypatch) -> None:
    """Before memory is taken for a model."""
    monkeypatch.setattr(torch, "from_file", lambda *args, **kwargs: pytest.fail("mapped"))
    path = tmp_path / "changed.gguf"
    path.write_bytes(change(files["target"][0].read_bytes()))
    with pytest.raises(ValueError, match=match):
        load_gguf(path)


def test_the_package_that_knows_the_types_is_missing(files: Files, monkeypatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"hf_specdec\[gguf\]"):
        load_gguf(files["target"][0])


def test_the_pipeline_speaks(files: Files) -> None:
    path, asked = files["target"]
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"t{at}": at for at in range(48)}, unk_token="t0")),
        unk_token="t0",
        pad_token="t0",
    )
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [
        pipeline("text-generation", model=model, tokenizer=words)("t5 t6 t7 t8", max_new_tokens=5, do_sample=False)
        for model in (load_gguf(path, dtype=torch.float64), asked)
    ]
    assert texts[0] == texts[1]


def test_shapes_that_are_not_the_configuration_s(files: Files) -> None:
    config = LlamaConfig(**{**files["target"][1].config.to_dict(), "intermediate_size": 256})
    with pytest.raises(ValueError, match=r"shape \(512, 256\) for model\.layers\.0\.mlp\.gate_proj\.weight"):
        load_gguf(files["target"][0], config=config)
