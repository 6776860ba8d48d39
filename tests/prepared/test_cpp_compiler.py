"""C++ in the background: a code is returned before its library is there, and waits for it at its first call."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch._inductor.codecache")

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppCodeCache, CppWrapperCodeCache

from hf_specdec.prepared.cpp_compiler import in_background, load_library


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Libraries that doubled their input, in place of the compiler's; which were submitted, and which awaited."""
    seen: list[str] = []

    def start(cls: type, name: str, submit_fn: Callable[..., Any] | None = None) -> Callable[[], Callable[[int], int]]:
        if submit_fn is not None:
            seen.append(f"{name} submitted")

        def library() -> Callable[[int], int]:
            seen.append(f"{name} awaited")
            return lambda number: 2 * number

        return library

    monkeypatch.setattr(CppWrapperCodeCache, "load_pybinding_async", classmethod(start))
    return seen


def test_code_waits_for_its_library_at_its_first_call(libraries: list[str]) -> None:
    with in_background():
        double = CppWrapperCodeCache.load_pybinding("double")
    assert libraries == ["double submitted"]
    assert double(3) == 6
    assert libraries == ["double submitted", "double awaited"]


def test_outside_the_block_code_is_compiled_before_it_is_returned(libraries: list[str]) -> None:
    before = CppWrapperCodeCache.__dict__.get("load_pybinding")
    with pytest.raises(KeyError), in_background():
        raise KeyError
    assert CppWrapperCodeCache.__dict__.get("load_pybinding") is before
    CppWrapperCodeCache.load_pybinding("double")
    assert libraries == ["double awaited"]


def test_without_inductors_functions_it_compiles_as_inductor_does(
    libraries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(AsyncCompile, "submit")
    with in_background():
        CppWrapperCodeCache.load_pybinding("double")
    assert libraries == ["double awaited"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of inductor's folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_library_that_is_cut_short_is_compiled_anew(cache: Path) -> None:
    library = CppCodeCache.load_async('extern "C" int twice(int number) { return 2 * number; }')
    (source,) = cache.glob("*/*.main.cpp")
    source.with_suffix(".so").touch()
    with pytest.raises(OSError, match="file too short"):
        library()
    assert load_library(library).twice(4) == 8


def test_code_in_a_library_that_is_cut_short_is_compiled_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache / "double.so"
    file.touch()

    def start(cls: type, name: str, **options: Any) -> Callable[[], Callable[[int], int]]:
        def library() -> Callable[[int], int]:
            if file.exists():
                raise ImportError(f"{file}: file too short")
            return lambda number: 2 * number

        return library

    monkeypatch.setattr(CppWrapperCodeCache, "load_pybinding_async", classmethod(start))
    with in_background():
        double = CppWrapperCodeCache.load_pybinding("double")
    assert double(3) == 6


def test_a_library_that_is_not_inductors_is_left_alone(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("elsewhere") / "short.so"
    file.touch()
    with pytest.raises(OSError, match="file too short"):
        load_library(lambda: CDLL(str(file)))
    assert file.exists()
