"""C++ in the background: a code is returned before its library is there, and waits for it at its first call."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch._inductor.codecache")

from torch._inductor import async_compile
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppWrapperCodeCache

from hf_specdec.compat.inductor import in_background


@pytest.fixture
def libraries(monkeypatch) -> list[str]:
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
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    return seen


def test_code_waits_for_its_library_at_its_first_call(libraries: list[str]) -> None:
    with in_background():
        double = CppWrapperCodeCache.load_pybinding("double")
    assert libraries == ["double submitted"] and double(3) == 6
    assert libraries == ["double submitted", "double awaited"]


def test_one_processor_compiles_at_the_first_call(libraries: list[str], monkeypatch) -> None:
    """Inductor would compile while it holds a lock that compiling waits for."""
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    with in_background():
        double = CppWrapperCodeCache.load_pybinding("double")
    assert libraries == [] and double(3) == 6
    assert libraries == ["double awaited"]


def test_outside_the_block_code_is_compiled_before_it_is_returned(libraries: list[str]) -> None:
    before = CppWrapperCodeCache.__dict__.get("load_pybinding")
    with pytest.raises(KeyError), in_background():
        raise KeyError
    assert CppWrapperCodeCache.__dict__.get("load_pybinding") is before
    CppWrapperCodeCache.load_pybinding("double")
    assert libraries == ["double awaited"]


def test_without_inductors_functions_it_compiles_as_inductor_does(libraries: list[str], monkeypatch) -> None:
    monkeypatch.delattr(AsyncCompile, "submit")
    with in_background():
        CppWrapperCodeCache.load_pybinding("double")
    assert libraries == ["double awaited"]
