"""Code that was compiled is found again by what it was compiled for, and by nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_specdec.prepared import code_on_disk, compiled_step
from hf_specdec.prepared.compiled_step import CompiledStep

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of torch's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    return tmp_path / "torch" / "hf_specdec"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file to be kept."""
    file = tmp_path / "library.so"
    file.write_bytes(b"no code")
    return file


def test_it_is_found_by_what_it_was_compiled_for(folder: Path, library: Path) -> None:
    assert not code_on_disk.any_kept()
    code_on_disk.keep(("layer", 2), library)
    assert code_on_disk.any_kept()
    assert code_on_disk.library_for(("layer", 2)) == library
    assert code_on_disk.library_for(("layer", 3)) is None


@pytest.mark.parametrize("change", ["torch", "processor", "settings"])
def test_it_is_not_found_where_it_might_not_run(
    change: str, folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code_on_disk.keep("layer", library)
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif change == "processor":
        monkeypatch.setattr(code_on_disk, "reported", lambda name: "fpu sse")
    else:
        monkeypatch.setattr(code_on_disk, "OPTIONS", {"cpp_wrapper": True})
    assert code_on_disk.library_for("layer") is None


def test_a_library_that_is_gone_or_broken_is_not_used(folder: Path, library: Path) -> None:
    code_on_disk.keep("layer", library)
    assert code_on_disk.code_for("layer") is None, "no library"
    library.unlink()
    assert code_on_disk.library_for("layer") is None


def test_a_folder_that_cannot_be_written_to_is_left_alone(folder: Path, library: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("in the way")
    code_on_disk.keep("layer", library)
    assert code_on_disk.library_for("layer") is None and folder.read_text() == "in the way"


@pytest.fixture
def step() -> Iterator[CompiledStep]:
    """Compiled by inductor in this test, not found."""
    compiled_step._codes.clear()
    yield lambda: CompiledStep(lambda x, y: (x @ y + 1, torch.relu(x)), CPU, "step")
    compiled_step._codes.clear()


def _code(folder: Path) -> list[Path]:
    """Inductor's libraries in the folder, without those of our own C++."""
    libraries = [link.resolve() for link in folder.glob("*/*.so")]
    return [library for library in libraries if code_on_disk.function_in(library) is not None]


@pytest.mark.compiles
def test_what_was_compiled_is_loaded_without_the_compiler(
    step: type[CompiledStep], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: tuple[Tensor, ...] = (torch.randn(3, 3), torch.randn(3, 3))
    compiled = step()(*given)
    assert len(_code(folder)) == 1
    compiled_step._codes.clear()
    monkeypatch.setattr(compiled_step, "_compile", None)
    for loaded in (step()(*given), step()(*given)):
        assert all(torch.equal(one, other) for one, other in zip(loaded, compiled, strict=True))
    # The negative control: for other shapes there is no code.
    with pytest.raises(TypeError, match="NoneType"):
        step()(torch.randn(2, 3), torch.randn(3, 3))


@pytest.mark.parametrize("lacking", ["_aoti", "_dynamo"])
def test_without_torch_s_functions_it_is_compiled(
    lacking: str, step: type[CompiledStep], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = torch.randn(3, 3), torch.randn(3, 3)
    compiled = step()(*given)
    compiled_step._codes.clear()
    (kept,) = _code(folder)
    monkeypatch.delattr(torch._C, lacking)
    assert code_on_disk._code_in(kept) is None
    monkeypatch.undo()
    assert torch.equal(step()(*given)[0], compiled[0])
