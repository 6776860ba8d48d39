"""How inductor's C++ is compiled on a CPU: its settings, and in the background while the next part is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

Library = TypeVar("Library")

# A product and a sum in one instruction. What the processor reports is believed: trying each set of instructions by
# compiling a program takes seconds.
INSTRUCTIONS: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast", "cpp.vec_isa_ok": True}
# Code without Python, and no checks of shapes, which never change.
OPTIONS: dict[str, Any] = {**INSTRUCTIONS, "cpp_wrapper": True, "size_asserts": False}


class _Declarations(dict[Any, list[str]]):
    """C functions by operation; inductor's cache takes the text, since operations can't be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (sorted(text for texts in self.values() for text in texts),)


def calling(functions: dict[Any, list[str]]) -> dict[str, Any]:
    """The settings by which inductor's code calls operations by C functions, where inductor can.

    Args:
        functions: the C declarations for each operation.
    """
    # Importing it takes seconds.
    from torch._inductor import config

    known = hasattr(config.aot_inductor, "custom_ops_to_c_shims")
    return {"aot_inductor.custom_ops_to_c_shims": _Declarations(functions)} if known else {}


def find_instructions() -> None:
    """Let inductor look up the processor's instructions, which it must not do in two threads at once."""
    # Importing these takes seconds.
    from torch._inductor import codecache, config  # noqa: F401, or tracing would import it
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with config.patch(INSTRUCTIONS):
        pick_vec_isa()


@contextmanager
def in_background(finished: Callable[[Path], None] = lambda library: None) -> Iterator[None]:
    """Compile inductor's C++ in threads; the code waits for its library when it is first called.

    Without the functions that this replaces, code is compiled before it is returned, as inductor does it.

    Args:
        finished: called with the file of each library once it is loaded.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppWrapperCodeCache as Cache

    submit, start = getattr(AsyncCompile, "submit", None), getattr(Cache, "load_pybinding_async", None)
    if submit is None or start is None:
        yield
        return

    def load(*args: Any, **options: Any) -> Callable[..., Any]:
        """As `CppWrapperCodeCache.load_pybinding`, but the function waits for its library at its first call."""
        library = start(*args, submit_fn=submit, **options)

        @cache
        def function() -> Callable[..., Any]:
            loaded = load_library(library)
            file = getattr(getattr(loaded, "__self__", None), "__file__", None)
            if file is not None:
                finished(Path(file))
            return loaded

        return lambda *inputs: function()(*inputs)

    with patch.object(Cache, "load_pybinding", load):
        yield


def load_library(library: Callable[[], Library]) -> Library:
    """What inductor's function loads; compiled anew where a process that was killed left a file that is cut short.

    Raises:
        ImportError, OSError: the library can't be loaded, and is no file of inductor's cache or fails again.
    """
    try:
        return library()
    except (ImportError, OSError) as error:
        file = Path(str(error).partition(": ")[0])  # as the dynamic loader has it: "file: reason"
        if not _in_cache(file):
            raise
        file.unlink()
        return library()


def _in_cache(file: Path) -> bool:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return file.is_file() and Path(cache_dir()).resolve() in file.resolve().parents
