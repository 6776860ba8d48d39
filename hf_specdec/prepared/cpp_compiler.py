"""How inductor's C++ is compiled on a CPU: its settings, and in the background while the next part is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

# A product and a sum in one instruction. What the processor reports is believed: trying each set of instructions by
# compiling a program takes seconds.
INSTRUCTIONS: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast", "cpp.vec_isa_ok": True}
# Code without Python, no checks of shapes, which never change, and no cache of inductor's, since we keep the libraries.
OPTIONS: dict[str, Any] = {
    **INSTRUCTIONS,
    "cpp_wrapper": True,
    "size_asserts": False,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
}


def calling(functions: dict[Any, list[str]]) -> dict[str, Any]:
    """The settings by which inductor's code calls operations by C functions, where inductor can.

    Args:
        functions: the C declarations for each operation.
    """
    # Importing it takes seconds.
    from torch._inductor import config

    known = hasattr(config.aot_inductor, "custom_ops_to_c_shims")
    return {"aot_inductor.custom_ops_to_c_shims": functions} if known else {}


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
            try:
                loaded = library()
            except BaseException:
                Cache.cache_clear()  # which would keep the failure of a compiler that was interrupted
                raise
            file = getattr(getattr(loaded, "__self__", None), "__file__", None)
            if file is not None:
                finished(Path(file))
            return loaded

        return lambda *inputs: function()(*inputs)

    with patch.object(Cache, "load_pybinding", load):
        yield
