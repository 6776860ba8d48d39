"""Code that was compiled is found again, only as it was compiled, in a folder to which nobody else can write."""

import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import CppWrapperCodeCache

from hf_specdec.prepared import code_folder, code_on_disk, compiled_step
from hf_specdec.prepared.code_folder import Folders, NoFolderError, folders_named
from hf_specdec.prepared.compiled_step import CompiledStep
from hf_specdec.prepared.own_builds import CompilerError

CPU = torch.device("cpu")


@pytest.fixture
def library(disk: Path) -> Path:
    """A file to be kept."""
    return _written(disk / "library.so", b"no code" * 1000)


def _written(file: Path, content: bytes) -> Path:
    """A new file: the one before may be kept by a link to it."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)
    return file


def test_it_is_found_by_what_it_was_compiled_for(library: Path) -> None:
    assert not code_on_disk.any_kept()
    code_on_disk.keep(("layer", 2), library)
    assert code_on_disk.any_kept()
    found = code_on_disk.library_for(("layer", 2))
    assert found is not None and found.read_bytes() == library.read_bytes()
    assert code_on_disk.library_for(("layer", 3)) is None


@pytest.mark.parametrize("change", ["torch", "processor", "instructions", "settings", "environment", "compiler"])
def test_it_is_not_found_where_it_might_not_run(change: str, library: Path, monkeypatch) -> None:
    code_on_disk.keep("layer", library)
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif change == "processor":
        monkeypatch.setattr(code_on_disk, "reported", lambda name: "fpu sse")
    elif change == "instructions":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    elif change == "settings":
        monkeypatch.setattr(code_on_disk, "OPTIONS", {"cpp_wrapper": True})
    elif change == "environment":
        monkeypatch.setenv("TORCHINDUCTOR_CPP_MARCH", "x86-64")
    else:
        monkeypatch.setenv("CXX", sys.executable)
    code_on_disk._made_for.cache_clear()
    assert code_on_disk.library_for("layer") is None


def test_without_a_compiler_what_was_compiled_is_found(library: Path, monkeypatch) -> None:
    code_on_disk.keep("layer", library)
    monkeypatch.setenv("CXX", "no such compiler")
    assert code_on_disk.library_for("layer") is not None


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "within").touch()


def _pipe(file: Path) -> None:
    """A link to what never ends."""
    file.unlink()
    os.mkfifo(file.with_suffix(".pipe"))
    file.symlink_to(file.with_suffix(".pipe"))


def _linked(file: Path) -> None:
    file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


BROKEN: dict[str, Callable[[Path], Any]] = {
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("text"),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:64]),
    "one bit": lambda file: file.write_bytes(b"o" + file.read_bytes()[1:]),
    "gone": lambda file: file.unlink(),
    "a folder": _folder,
    "a pipe": _pipe,
    "a link": _linked,
    "writable by all": lambda file: file.chmod(0o777),
}


@pytest.mark.skipif(sys.platform == "win32", reason="pipes and modes of files")
@pytest.mark.parametrize("which", ["library", "record"])
@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_not_found_and_replaced(change: Callable[[Path], Any], which: str, library: Path) -> None:
    code_on_disk.keep("layer", library)
    found, whole = code_on_disk.library_for("layer"), library.read_bytes()
    change(found if which == "library" else found.with_name(code_on_disk._record("layer")))
    assert code_on_disk.library_for("layer") is None and not code_on_disk.take("layer", library.with_name("taken"))
    code_on_disk.keep("layer", _written(library, whole))
    assert code_on_disk.library_for("layer") == found and found.read_bytes() == whole


@pytest.mark.skipif(sys.platform == "win32", reason="owners of files")
def test_a_library_of_another_user_is_not_found(library: Path, monkeypatch) -> None:
    """Though it and its record were planted with the right names, before the folder was closed to others."""
    code_on_disk.keep("layer", library)
    assert code_on_disk.library_for("layer") is not None
    monkeypatch.setattr(os, "getuid", lambda: 2**20)
    assert code_on_disk.library_for("layer") is None


def test_another_library_under_its_name_is_not_found(library: Path) -> None:
    code_on_disk.keep("layer", library)
    code_on_disk.keep("other", _written(library, b"other code"))
    layer, other = code_on_disk.library_for("layer"), code_on_disk.library_for("other")
    assert layer is not None and other is not None
    shutil.copy(other, layer)
    assert code_on_disk.library_for("layer") is None


def test_a_file_that_is_no_library_is_no_code(library: Path) -> None:
    code_on_disk.keep("layer", library)
    assert code_on_disk.code_for("layer") is None


def test_what_is_taken_is_left_as_it_is_on_disk(library: Path) -> None:
    code_on_disk.keep("layer", library)
    place = code_on_disk.workplace() / "taken.so"
    place.write_text("in the way")
    assert code_on_disk.take("layer", place) and place.read_bytes() == library.read_bytes()
    place.unlink()
    assert code_on_disk.library_for("layer") is not None


def test_where_no_folder_takes_it_nothing_is_kept(disk: Path, library: Path) -> None:
    for name in ("torch", "cache", "temporary"):
        shutil.rmtree(disk / name, ignore_errors=True)
        (disk / name).write_text("in the way")
    code_on_disk.keep("layer", library)
    assert code_on_disk.library_for("layer") is None and (disk / "torch").read_text() == "in the way"


def test_the_workplace_ends_with_its_process(disk: Path) -> None:
    """That of one that was killed is removed by a later one."""
    place = code_on_disk.workplace()
    assert code_on_disk.workplace() == place and not any(place.iterdir())
    code_on_disk._remove(place, os.getpid() + 1)  # at the end of a fork
    assert place.is_dir()
    code_on_disk._remove(place, os.getpid())
    killed, running = place.with_name(f"{place.name}-1"), place.with_name(f"{place.name}-2")
    for other, unused in ((killed, 2 * code_on_disk._STALE), (running, 0)):
        other.mkdir()
        os.utime(other, (time.time() - unused,) * 2)
    assert code_on_disk.workplace() != place and running.is_dir() and not killed.exists()


@pytest.fixture
def step(own_steps: None) -> Callable[[], CompiledStep]:
    """Inductor makes its code in this test."""
    return lambda: CompiledStep(lambda x, y: (x @ y + 1, torch.relu(x)), CPU, "step")


@pytest.fixture
def kept(monkeypatch) -> Iterator[list[Path]]:
    """The libraries that are kept of steps."""
    seen: list[Path] = []
    keep = code_on_disk.keep

    def noted(what: Any, library: Path) -> None:
        keep(what, library)
        if type(what) is tuple:
            seen.append(library)

    monkeypatch.setattr(code_on_disk, "keep", noted)
    yield seen


@pytest.mark.compiles
def test_what_was_compiled_is_loaded_without_the_compiler(step, kept, monkeypatch) -> None:
    given: tuple[Tensor, ...] = (torch.randn(3, 3), torch.randn(3, 3))
    compiled = step()(*given)
    assert len(kept) == 1
    compiled_step._codes.clear()
    monkeypatch.setattr(compiled_step, "_compile", None)
    for loaded in (step()(*given), step()(*given)):
        assert all(torch.equal(one, other) for one, other in zip(loaded, compiled, strict=True))
    # The negative control: for other shapes there is no code.
    with pytest.raises(TypeError, match="NoneType"):
        step()(torch.randn(2, 3), torch.randn(3, 3))


@pytest.mark.parametrize("lacking", ["_aoti", "_dynamo"])
def test_without_torch_s_functions_it_is_compiled(lacking: str, step, kept, monkeypatch) -> None:
    given = torch.randn(3, 3), torch.randn(3, 3)
    compiled = step()(*given)
    compiled_step._codes.clear()
    (library,) = kept
    monkeypatch.delattr(torch._C, lacking)
    assert code_on_disk._code_in(library) is None
    monkeypatch.undo()
    assert torch.equal(step()(*given)[0], compiled[0])


def test_what_a_compiler_failed_at_is_compiled_by_the_next_call(step: Callable[[], CompiledStep], monkeypatch) -> None:
    """It may have been interrupted."""
    given, interrupted, take = (torch.randn(3, 3), torch.randn(3, 3)), [True], code_on_disk.take

    def failing(what: Any, place: Path) -> bool:
        if interrupted and what.endswith(".so"):
            raise CompilerError("interrupted")
        return take(what, place)

    compiled_step._inductor().result()
    step()(*given)
    for forgotten in (CppWrapperCodeCache.cache_clear, code_on_disk._workplaces.clear, compiled_step.forget_codes):
        forgotten()
    monkeypatch.setattr(code_on_disk, "code_for", lambda what: None)
    monkeypatch.setattr(code_on_disk, "take", failing)
    with pytest.raises(CompilerError):
        step()(*given)
    interrupted.clear()
    with pytest.raises(CompilerError):  # the negative control: the code keeps the failure
        step()(*given)
    compiled_step.forget_codes()
    assert torch.equal(step()(*given)[0], given[0] @ given[1] + 1)


MODES = pytest.mark.skipif(sys.platform == "win32", reason="modes of files")


def _places(folders: Folders) -> list[str]:
    """The kinds of the readable folders, see `disk`."""
    return [folder.parent.parent.name for folder in folders.readable]


@MODES
def test_it_is_in_torchs_folder_and_closed_to_others(disk: Path) -> None:
    before = os.umask(0)
    try:
        found = folders_named("code")
    finally:
        os.umask(before)
    assert found.readable == (disk / "torch" / "hf_specdec" / "code",) and found.writable == found.readable[0]
    for folder in (found.readable[0], found.readable[0].parent, disk / "torch"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@MODES
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
@pytest.mark.parametrize("which", ["torch", "torch/hf_specdec", "torch/hf_specdec/code"])
def test_one_that_others_can_write_to_is_not_used(mode: int, which: str, disk: Path) -> None:
    folder = disk / which
    folder.mkdir(mode=0o700, parents=True)
    folder.chmod(mode)
    # In a folder like that of temporary files nobody can exchange a folder of ours, but put one in its place before.
    expected = "torch" if mode == 0o1777 and not which.endswith("code") else "cache"
    assert _places(folders_named("code")) == [expected]
    assert expected == "torch" or not any(folder.iterdir()), "nothing is put there"


@MODES
def test_neither_is_a_link_to_one(disk: Path) -> None:
    (disk / "open").mkdir()
    (disk / "open").chmod(0o777)
    (disk / "torch").symlink_to(disk / "open")
    assert _places(folders_named("code")) == ["cache"]


@MODES
def test_one_of_another_user_is_not_used(disk: Path, monkeypatch) -> None:
    folders_named("code")
    monkeypatch.setattr(code_folder.os, "getuid", lambda: 2**20)
    folders_named.cache_clear()
    found = folders_named("code")
    assert found.readable == () and found.writable is None
    monkeypatch.setattr(code_on_disk, "_folders", lambda: found)
    with pytest.raises(
        NoFolderError, match=r"belongs to another user.*; .*\. Set TORCHINDUCTOR_CACHE_DIR to a folder of"
    ):
        code_on_disk.workplace()


@MODES
@pytest.mark.parametrize("reason", ["read-only", "full", "noexec", "a file", "a space", "a quote"])
def test_where_one_takes_no_code_another_one_does(reason: str, disk: Path, monkeypatch) -> None:
    torchs = disk / {"a space": "tor ch", "a quote": "tor'ch"}.get(reason, "torch")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(torchs))
    access, asked = os.access, os.statvfs
    about = {"f_flag": os.ST_NOEXEC if reason == "noexec" else 0, "f_blocks": 1, "f_frsize": 2**12, "f_bavail": 2**20}
    if reason == "read-only":
        monkeypatch.setattr(
            code_folder.os, "access", lambda path, mode: torchs not in path.parents and access(path, mode)
        )
    elif reason == "a file":
        torchs.write_text("in the way")
    elif reason in ("full", "noexec"):
        left = {"full": 2**12}.get(reason, 2**20)
        special = SimpleNamespace(**{**about, "f_bavail": left})
        monkeypatch.setattr(code_folder.os, "statvfs", lambda path: special if torchs in path.parents else asked(path))
    found = folders_named("code")
    # What lies there already can be loaded, unless nothing can be.
    assert _places(found) == ([] if reason in ("noexec", "a file") else [torchs.name]) + ["cache"]
    assert found.writable == disk / "cache" / "hf_specdec" / "code"
    (refusal,) = found.refused
    assert refusal.startswith(str(torchs))


@MODES
def test_the_last_resort_is_a_folder_among_temporary_files(disk: Path, monkeypatch) -> None:
    for name in ("torch", "cache"):
        (disk / name).write_text("in the way")
    (disk / "temporary").chmod(0o1777)
    assert folders_named("code").writable == disk / "temporary" / f"hf_specdec_{os.getuid()}" / "code"


@MODES
def test_it_is_looked_up_once_a_process(disk: Path, monkeypatch) -> None:
    before = folders_named("code")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(disk / "other"))
    assert folders_named("code") == before
