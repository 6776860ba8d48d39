"""GGUF files as targets and drafts, with their tokenizer and chat template: in the script, and in Python."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from helpers.gguf_files import TEMPLATE, qwen2, write_gguf
from helpers.models import noisy
from helpers.tiny_pair import VOCABULARY, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.bench.aligning.shape import check_target
from hf_specdec.bench.inputs.prompts import decode_prompts
from hf_specdec.bench.models import names
from hf_specdec.bench.models.gguf_export import write_gguf as export_gguf
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.models.precision import quantize_made, quantized_layers
from hf_specdec.bench.models.real import convert_gguf
from hf_specdec.bench.results import load
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import draft as draft_task
from hf_specdec.gguf.weights import GgufWeight

ROWS = [[5, 9, 200, 17, 40], [7, 8, 9, 250, 31]]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A target and its draft; to be changed by no test."""
    folder, target = tmp_path_factory.mktemp("gguf"), qwen2(VOCABULARY)
    for name, model in (("target", target), ("draft", noisy(target))):
        write_gguf(folder / f"{name}.gguf", model, tokenizer())
    return folder / "target.gguf", folder / "draft.gguf"


def test_the_file_holds_the_model(files: tuple[Path, Path]) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(files[0].parent, gguf_file=files[0].name, dtype=torch.float32)
    expected = qwen2(VOCABULARY)
    ids = torch.tensor(ROWS)
    assert torch.equal(loaded(ids).logits, expected(ids).logits)


def test_models_from_gguf_files_give_the_targets_tokens(files: tuple[Path, Path]) -> None:
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float64) for path in files
    )
    ids = torch.tensor(ROWS)
    options = {"max_new_tokens": 30, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain = target.generate(ids, **options)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        out = target.generate(ids, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, plain) and 0 < out.speculation.acceptance_rate < 1


@pytest.mark.parametrize("as_folder", [False, True])
def test_the_script_decodes_with_both(script, files, as_folder: bool, tmp_path, capsys) -> None:
    models = ["--model_name", str(files[0]), "--assistant_model", str(files[1])]
    if as_folder:
        models = ["--model_name", str(files[0].parent), "--gguf_file", files[0].name]
        models += ["--assistant_model", str(files[1].parent), "--draft_gguf_file", files[1].name]
    line = [
        "--task", "decode", "--assisted_generation", "--prompt", "the rain", "--max_new_tokens", "5", "--dtype",
        "float32",
    ]  # fmt: skip
    assert script.main([*line, *models, "--output_dir", str(tmp_path)]) == 0
    assert "--- 1: --prompt" in capsys.readouterr().out
    result = load(next(tmp_path.glob("*.json.gz")))
    assert {role: model.name for role, model in result.models.items()} == {
        role: str(path) for role, path in zip(("target", "draft"), files, strict=True)
    }


def test_tokenizer_and_template_come_from_the_file(files: tuple[Path, Path]) -> None:
    pair = load_pair(Settings(model_name=str(files[0])))
    assert pair.tokenizer.chat_template == TEMPLATE
    prompts, _ = decode_prompts(pair, ["the rain"], 5)
    assert pair.tokenizer.decode(prompts[0].token_ids) == "<user>the rain<assistant>"
    assert pair.tokenizer("the rain").input_ids == tokenizer()("the rain").input_ids


def test_so_does_a_template_that_transformers_drops(files: tuple[Path, Path], monkeypatch) -> None:
    """As it does beside a saved tokenizer of LLaMA."""
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer())
    assert not tokenizer().chat_template
    assert load_pair(Settings(model_name=str(files[0]))).tokenizer.chat_template == TEMPLATE


def test_its_weights_can_be_quantized_anew(files: tuple[Path, Path]) -> None:
    assert quantized_layers(load_pair(Settings(model_name=str(files[0]), precision="int8")).target) > 0


def test_its_weights_can_stay_in_the_file(files: tuple[Path, Path], tmp_path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, qwen2(VOCABULARY), tokenizer(), matrices=GGMLQuantizationType.Q8_0)
    kinds = {"precision": "gguf", "draft_precision": "gguf", "dtype": "float32"}
    pair = load_pair(Settings(model_name=str(path), assistant_model=str(path), assisted_generation=True, **kinds))
    assert all(isinstance(model.lm_head.weight, GgufWeight) for model in pair.models)
    assert [model.dtype for model in pair.describe().values()] == ["Q8_0 weights, float32"] * 2
    with pytest.raises(BenchError, match="precision gguf needs a GGUF file"):
        load_pair(Settings(model_name="target", precision="gguf"))
    with pytest.raises(BenchError, match="is for GGUF files only"):
        quantize_made(qwen2(VOCABULARY), "gguf")


def test_names_that_end_with_a_file(files: tuple[Path, Path]) -> None:
    assert names.location("owner/name/a.gguf") == {"pretrained_model_name_or_path": "owner/name", "gguf_file": "a.gguf"}
    inner = names.location("owner/name/q4/a.gguf")
    assert inner == {"pretrained_model_name_or_path": "owner/name", "gguf_file": "q4/a.gguf"}
    here = {"pretrained_model_name_or_path": str(files[0].parent), "gguf_file": files[0].name}
    assert names.location(str(files[0])) == here
    with pytest.raises(BenchError, match="there is no such file"):
        load_pair(Settings(model_name=f"{files[0]}.gguf"))


def test_converting_keeps_weights_tokenizer_and_template(files: tuple[Path, Path], tmp_path) -> None:
    raw, folder = tmp_path / "raw", tmp_path / "converted"
    for path in (raw, folder):
        path.mkdir()
    (raw / "x.gguf").write_bytes(files[0].read_bytes())
    convert_gguf(raw, folder, {"do_sample": True, "top_k": 7})
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor(ROWS)
    assert torch.equal(model(ids).logits, qwen2(VOCABULARY)(ids).logits)
    assert (model.generation_config.top_k, model.generation_config.eos_token_id) == (7, 1)
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE


def test_a_draft_cut_out_of_a_file_is_saved_as_one(files: tuple[Path, Path], tmp_path) -> None:
    """Whole, with the file's tokenizer, in blocks of eight bits."""
    settings = Settings(task="draft", model_name=str(files[0]), assisted_generation=True)
    pair = load_pair(settings)
    check_target(pair)
    made = draft_task.cut(pair, (1,), [0, 1, 7]).draft
    made.save_pretrained(tmp_path)
    pair.tokenizer.save_pretrained(tmp_path)
    draft_task.save_as_gguf(pair, settings, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=draft_task.GGUF, dtype=torch.float32)
    expected, found = (model(torch.tensor(ROWS)).logits for model in (made, read))
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert (pair.target(torch.tensor(ROWS)).logits - expected).norm() > 0.05 * expected.norm()
    words = AutoTokenizer.from_pretrained(tmp_path, gguf_file=draft_task.GGUF)
    assert words.get_vocab() == pair.tokenizer.get_vocab() and words.chat_template == TEMPLATE


def test_a_trimmed_draft_is_written_whole(files: tuple[Path, Path], tmp_path) -> None:
    """Where its head is its embedding; otherwise its other rows are gone."""
    model = qwen2(VOCABULARY)
    with hf_specdec.trim_draft_head(model, [1, 2]), pytest.raises(ValueError, match="with a full head: restore"):
        export_gguf(model, tmp_path / "x.gguf", "f32")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    expected = model(torch.tensor(ROWS)).logits
    with hf_specdec.trim_draft_head(model, [1, 2]):
        export_gguf(model, tmp_path / "x.gguf", "f32", files[0])
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    torch.testing.assert_close(read(torch.tensor(ROWS)).logits, expected)
