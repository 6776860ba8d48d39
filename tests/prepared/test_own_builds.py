"""Inductor compiles for us in our folder and nowhere else, with what it needs there, and not without an end."""

import os
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

pytest.importorskip("torch._inductor.codecache")

from torch._inductor import codecache, config, cpp_builder
from torch._inductor.runtime.cache_dir_utils import cache_dir

from hf_specdec.compat import inductor
from hf_specdec.prepared import code_on_disk, own_builds, own_code
from hf_specdec.prepared.own_builds import CompilerError, in_own_folder, tell_going_without

CPU = torch.device("cpu")
ANSWERS = 'case "$1" in -*) echo version 1; exit 0;; esac'  # of a compiler, which is asked about itself
TWICE = 'extern "C" int twice(int number) { return 2 * number; }\n'


@pytest.fixture(scope="module", autouse=True)
def instructions() -> None:
    """Inductor tries them once a process."""
    with in_own_folder(CPU):
        inductor.find_instructions()


@pytest.fixture(autouse=True)
def another_process() -> Iterator[None]:
    """What this one has loaded and asked is forgotten."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    codecache.CppCodeCache.cache_clear()
    code_on_disk._workplaces.clear()
    own_builds._answer_of.cache_clear()
    own_builds._hanging.clear()


def _twice(library: Path) -> int:
    return int(CDLL(str(library)).twice(4))


@pytest.fixture
def runs(monkeypatch) -> list[list[str]]:
    """The commands of the compiler."""
    seen: list[list[str]] = []
    run = own_builds._run

    def noted(command: list[str], folder: Path, seconds: int) -> None:
        if "--version" not in command:
            seen.append(command)
        run(command, folder, seconds)

    monkeypatch.setattr(own_builds, "_run", noted)
    return seen


def test_later_processes_load_what_was_compiled(disk: Path, runs: list[list[str]]) -> None:
    assert _twice(own_code.library_of(TWICE)) == 8 and len(runs) == 1
    assert _twice(own_code.library_of(TWICE)) == 8 and len(runs) == 1
    # Inductor's own part of it is not needed for that, but where something else is new.
    (code_on_disk._folder() / code_on_disk._record(TWICE)).unlink()
    _forget()
    assert _twice(own_code.library_of(TWICE)) == 8 and len(runs) == 1
    _forget()
    assert _twice(own_code.library_of(TWICE + " ")) == 8 and len(runs) == 1, "inductor strips it"
    assert _twice(own_code.library_of(TWICE.replace("2", "3"))) == 12 and len(runs) == 2


@pytest.mark.parametrize("left", [0, 64, 5000], ids=["empty", "cut in its header", "cut after its header"])
def test_what_was_cut_short_is_compiled_anew_once(left: int, disk: Path, runs: list[list[str]]) -> None:
    whole = own_code.library_of(TWICE).read_bytes()
    for library in code_on_disk._folder().glob("*.so"):
        library.unlink()
        library.write_bytes(whole[:left])
    for _ in range(2):
        _forget()
        assert _twice(own_code.library_of(TWICE)) == 8 and len(runs) == 2


def test_what_lies_in_torchs_folder_is_not_loaded(disk: Path, runs: list[list[str]]) -> None:
    other = own_code.library_of(TWICE.replace("2", "3")).read_bytes()
    with config.patch(inductor.INSTRUCTIONS):
        codecache.CppCodeCache.load_async(TWICE)
        (source,) = (disk / "torch").glob("??/*.main.cpp")
        source.with_suffix(".so").write_bytes(other)
        _forget()
        assert _twice(own_code.library_of(TWICE)) == 8 and len(runs) == 2
        # The negative control: inductor by itself loads it.
        _forget()
        assert codecache.CppCodeCache.load(TWICE).twice(4) == 12


def test_other_calls_keep_their_folder(disk: Path) -> None:
    """Also where blocks in several threads overlap, the first to begin being the first to end."""
    names = ("_HEADER_DIR", "_HEADER_LOCK_DIR", "_precompile_header", "CppBuilder")
    before, folder = [getattr(codecache, name) for name in names], cache_dir()
    first, second = in_own_folder(CPU), in_own_folder(CPU)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    place = code_on_disk.workplace()
    assert cache_dir() == str(place) and place in Path(codecache._HEADER_DIR).parents
    assert cpp_builder.CppBuilder is codecache.CppBuilder is not before[-1]
    second.__exit__(None, None, None)
    assert cache_dir() == folder == str(disk / "torch")
    assert [getattr(codecache, name) for name in names] == before and cpp_builder.CppBuilder is before[-1]


def test_on_other_devices_inductors_own_folder_is_ours_and_lasts(disk: Path, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with in_own_folder(torch.device("cuda")):
        folder = Path(cache_dir())
        assert folder.parent == code_on_disk._folder() and Path(os.environ["TRITON_CACHE_DIR"]).parent == folder
    assert folder.is_dir() and "TRITON_CACHE_DIR" not in os.environ


def test_without_what_it_replaces_inductor_compiles_in_the_folder(disk: Path, monkeypatch) -> None:
    monkeypatch.delattr(codecache, "_HEADER_DIR")
    with in_own_folder(CPU):
        assert not config.cpp_cache_precompile_headers
        assert code_on_disk.workplace() in Path(codecache.CppCodeCache.load(TWICE)._name).parents


@pytest.fixture
def compiler(tmp_path) -> Iterator[Path]:
    """A program in place of the compiler."""
    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": (None, str(tmp_path / "compiler"))}):
        yield tmp_path / "compiler"
    cpp_builder.cpp_compiler_search.cache_clear()


def _write(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o700)


def test_that_there_is_no_compiler_is_told_once_with_the_way_out(disk: Path, compiler: Path) -> None:
    for reason in ("No such file or directory", "Permission denied"):
        with pytest.raises(CompilerError) as caught:
            own_code.library_of(TWICE)
        with pytest.warns(UserWarning) as told:
            for _ in range(2):
                tell_going_without("compile=True", caught.value)
        assert [str(warning.message) for warning in told] == [
            "compile=True: decoding goes on without, since preparing failed: "
            f"{compiler} can't be run ({reason}). Install g++, or set CXX to a C++ compiler"
        ]
        compiler.touch(mode=0o600)


@pytest.mark.parametrize("when", ["asked", "compiling"])
def test_one_that_hangs_is_waited_for_once(when: str, disk, compiler, runs, monkeypatch) -> None:
    _write(compiler, f"{ANSWERS if when == 'compiling' else ':'}; exec tail -f /dev/null")
    monkeypatch.setattr(own_builds, "ANSWER", 0.1 if when == "asked" else 30)
    monkeypatch.setattr(own_builds, "LONGEST", 0.1)
    with pytest.raises(CompilerError, match=r"compiler did not finish within 0.1 seconds\. Install g\+\+, or set CXX"):
        own_code.library_of(TWICE)
    monkeypatch.setattr(own_builds.subprocess, "run", lambda *args, **options: pytest.fail("tried again"))
    own_builds._answer_of.cache_clear()
    with pytest.raises(CompilerError, match="did not finish"):
        own_code.library_of(TWICE)


def test_one_that_fails_is_quoted(disk: Path, compiler: Path) -> None:
    _write(
        compiler,
        'case "$1" in -*) echo version 1; exit 0;; esac; echo "In file x:"; echo "fatal error: no room" >&2; exit 1',
    )
    with pytest.raises(CompilerError, match=r"compiler failed: fatal error: no room$"):
        own_code.library_of(TWICE)


def _full(program: Path, place: str) -> None:
    """A compiler that fails if its temporary files go to a place, and otherwise compiles."""
    fails = f'case "$TMPDIR" in {place}) echo "as: a.s: No space left on device"; echo "collect2: error"; exit 1;; esac'
    _write(program, f'{ANSWERS}; {fails}; exec "${{CXX:-g++}}" "$@"')


def test_its_temporary_files_are_where_there_is_room(disk: Path, compiler: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", "/full")
    _full(compiler, "/full")
    assert _twice(own_code.library_of(TWICE)) == 8


def test_that_there_is_no_room_is_told_with_the_way_out(disk: Path, compiler: Path) -> None:
    _full(compiler, "*")
    with pytest.raises(
        CompilerError, match=r"failed: no space is left in .*\. Free some, or set TORCHINDUCTOR_CACHE_DIR to"
    ):
        own_code.library_of(TWICE)


def test_of_inductors_errors_the_first_line_is_told() -> None:
    class InductorError(Exception):
        inner_exception = RuntimeError("first line\nwhere it came from")

    with pytest.warns(UserWarning, match="since preparing failed: RuntimeError: first line$"):
        tell_going_without("x", InductorError("pages"))
    with pytest.warns(UserWarning, match="since preparing failed: ValueError: $"):
        tell_going_without("x", ValueError())


@pytest.mark.compiles
def test_compiling_shows_progress(capsys) -> None:
    logging.enable_progress_bar()
    assert own_code._compile("").is_file() and "Compiling kernels: 100%" in capsys.readouterr().err
