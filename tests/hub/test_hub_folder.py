"""The folder for the hub, loaded by transformers itself: it decodes as `enable` does, and names missing packages."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import llama, noisy, prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel, dynamic_module_utils

import hf_specdec
from hf_specdec.config import FIELDS
from hf_specdec.hub.__main__ import main, write

CALL: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
BILD: dict[str, Any] = {
    "generation_strategy": "bild", "fallback_threshold": 0.05, "rollback_threshold": 9.0, "num_assistant_tokens": 3
}  # fmt: skip


@pytest.fixture
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = llama()
    return target, noisy(target, 0.1)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """The written folder, in an environment in which the package counts as installed."""
    installed = tmp_path / "installed" / f"hf_specdec-{hf_specdec.__version__}.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hf_specdec\nVersion: {hf_specdec.__version__}\n")
    monkeypatch.syspath_prepend(installed.parent)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert main([str(tmp_path / "hub")]) == 0
    yield tmp_path / "hub"
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def from_folder(folder: Path, model: PreTrainedModel, **call: Any) -> Tensor:
    call = {"custom_generate": str(folder), "trust_remote_code": True, **call}
    return model.generate(**prompts(2), **CALL, **call)


def test_the_folder_holds_what_transformers_looks_for(folder: Path) -> None:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"}
    assert all(f"`{name}`" in (folder / "README.md").read_text() for name in FIELDS), "it names every setting"


def test_greedy_output_is_plain_generate_s(folder: Path, pair) -> None:
    target, draft = pair
    plain = target.generate(**prompts(2), **CALL)
    before = GenerationMixin.generate
    assert torch.equal(from_folder(folder, target, assistant_model=draft), plain)
    stats = hf_specdec.last_speculation(target)
    assert stats is not None and stats.rounds and GenerationMixin.generate is before, "speculated, and left no trace"
    control = target.generate(**prompts(2), **{**CALL, "max_new_tokens": 23})
    assert not torch.equal(plain, control)


def test_bild_with_thresholds_is_that_of_enable(folder: Path, pair) -> None:
    target, draft = pair
    with hf_specdec.enable(target):
        ours = target.generate(**prompts(2), **CALL, assistant_model=draft, **BILD)
    assert torch.equal(from_folder(folder, target, assistant_model=draft, **BILD), ours)
    lossless = from_folder(folder, target, assistant_model=draft, **{**BILD, "rollback_threshold": 0.0})
    assert not torch.equal(ours, lossless), "the threshold decides what is written"


def test_settings_of_the_call_and_of_the_generation_config_reach_it(folder: Path, pair) -> None:
    target, draft = pair

    def longest(**call: Any) -> int:
        from_folder(folder, target, assistant_model=draft, **call)
        stats = hf_specdec.last_speculation(target)
        return max(max(round.drafted) for round in stats.rounds)

    assert [longest(num_assistant_tokens=tokens) for tokens in (2, 5)] == [2, 5]
    target.generation_config.num_assistant_tokens = 3
    assert longest() == 3
    for name, value in (BILD | {"fallback_threshold": 1.0}).items():
        setattr(target.generation_config, name, value)
    assert longest() == 0, "its strategy counts before the default one"
    lookup = from_folder(folder, target, drafter="suffix", generation_strategy="speculative")
    assert torch.equal(lookup, target.generate(**prompts(2), **CALL))


def test_mistyped_settings_are_refused_and_where_the_file_lies_is_not(folder: Path, pair) -> None:
    target, draft = pair
    with pytest.raises(ValueError, match="lookahaed=3 is not an argument"):
        from_folder(folder, target, assistant_model=draft, lookahaed=3)
    from_folder(folder, target, assistant_model=draft, revision="main", local_files_only=True)


def test_in_a_model_s_folder_it_replaces_its_generate(pair, folder: Path) -> None:
    target, draft = pair
    target.save_pretrained(folder)
    (folder / "README.md").write_text("its own")
    write(folder)
    assert (folder / "README.md").read_text() == "its own"
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert "generate" in vars(loaded)
    out = loaded.generate(**prompts(2), **CALL, assistant_model=draft)
    assert hf_specdec.last_speculation(loaded) is not None
    assert torch.equal(out, target.generate(**prompts(2), **CALL))


class NotInstalled:
    """Finds every module but the package."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == "hf_specdec":
            raise ModuleNotFoundError(f"No module named {name!r}")


def test_transformers_itself_says_that_the_package_is_missing(folder: Path, pair, monkeypatch) -> None:
    target, draft = pair
    requirements = folder / "custom_generate" / "requirements.txt"
    required = requirements.read_text()
    requirements.write_text("hf_specdec>=99.0\n")
    with pytest.raises(ImportError, match=r"Missing requirements[^\n]*\nhf_specdec>=99.0"):
        from_folder(folder, target, assistant_model=draft)
    requirements.write_text(required)
    from_folder(folder, target, assistant_model=draft)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "hf_specdec")
    with pytest.raises(ImportError, match=r"requires the following packages that were not found .*: hf_specdec"):
        from_folder(folder, target, assistant_model=draft)


def test_a_folder_that_cannot_be_written_is_said(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 1
    assert "file' can't be written to" in capsys.readouterr().err
