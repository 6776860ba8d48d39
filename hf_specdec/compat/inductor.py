"""The private parts of torch's inductor that the package uses. Seen in torch 2.13.

Importing inductor takes seconds, so every function imports what it needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

# A product and a sum in one instruction. The processor's own report is trusted: testing each set of instructions by
# compiling a program takes seconds.
INSTRUCTIONS: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast", "cpp.vec_isa_ok": True}
# Code without Python, without checks of shapes (they never change), and without inductor's cache (we keep libraries).
OPTIONS: dict[str, Any] = {
    **INSTRUCTIONS,
    "cpp_wrapper": True,
    "size_asserts": False,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
}


def calling(functions: dict[Any, list[str]]) -> dict[str, Any]:
    """The settings with which inductor's code calls operations as C functions, if inductor supports that.

    Args:
        functions: the C declarations for each operation.
    """
    from torch._inductor import config

    known = hasattr(config.aot_inductor, "custom_ops_to_c_shims")
    return {"aot_inductor.custom_ops_to_c_shims": functions} if known else {}


def find_instructions() -> None:
    """Let inductor look up the processor's instructions, which two threads must not do at once."""
    from torch._inductor import codecache, config  # noqa: F401, or tracing would import it
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with config.patch(INSTRUCTIONS):
        pick_vec_isa()


@contextmanager
def in_background(finished: Callable[[Path], None] = lambda library: None) -> Iterator[None]:
    """Compile inductor's C++ in threads; the code waits for its library when it is first called.

    Without the functions that this replaces, code is compiled before it is returned, as in inductor itself. On a single
    processor it is compiled at its first call: inductor's `submit` would compile it at once, under a lock that
    compiling waits for.

    Args:
        finished: called with the file of each library once it is loaded.
    """
    from torch._inductor import async_compile
    from torch._inductor.codecache import CppWrapperCodeCache as Cache

    submit = getattr(async_compile.AsyncCompile, "submit", None)
    start = getattr(Cache, "load_pybinding_async", None)
    if submit is None or start is None:
        yield
        return
    threads = getattr(async_compile, "get_compile_threads", lambda: 2)()

    def load(*args: Any, **options: Any) -> Callable[..., Any]:
        """Like `CppWrapperCodeCache.load_pybinding`, but the function waits for its library at its first call."""
        library = start(*args, submit_fn=submit if threads > 1 else None, **options)

        @cache
        def function() -> Callable[..., Any]:
            """The library's function, once it is compiled."""
            try:
                loaded = library()
            except BaseException:
                Cache.cache_clear()  # it would keep the failure of an interrupted compiler
                raise
            file = getattr(getattr(loaded, "__self__", None), "__file__", None)
            if file is not None:
                finished(Path(file))
            return loaded

        return lambda *inputs: function()(*inputs)

    with patch.object(Cache, "load_pybinding", load):
        yield


def keep_imported() -> None:
    """Import the module that fixes the cache's folders at its import."""
    from torch._inductor import codecache  # noqa: F401


def compiler() -> str | None:
    """The C++ compiler that inductor calls; None if it would install one first (`TORCH_INDUCTOR_INSTALL_GXX`)."""
    from torch._inductor import config

    return None if os.environ.get("TORCH_INDUCTOR_INSTALL_GXX") else str(config.cpp.cxx[-1])


@contextmanager
def building(place: Path, build: Callable[[Any], None]) -> Iterator[None]:
    """Compile C++ through `build`, with precompiled headers in `place`.

    Without the names that this replaces, inductor compiles by itself, and without precompiled headers.

    Args:
        place: an existing folder.
        build: called with inductor's builder, which holds the file to make and the command that makes it.
    """
    from torch._inductor import codecache, config, cpp_builder

    with ExitStack() as changes:
        headers = _headers_in(place)
        if headers is None:
            changes.enter_context(config.patch(cpp_cache_precompile_headers=False))
        else:
            folder = place / "precompiled_headers"
            new = {"_HEADER_DIR": str(folder), "_HEADER_LOCK_DIR": str(folder / "locks"), "_precompile_header": headers}
            changes.enter_context(patch.multiple(codecache, **new))
        for module in (codecache, cpp_builder):
            if hasattr(module, "CppBuilder") and sys.platform != "win32":
                changes.enter_context(patch.object(module, "CppBuilder", _builder(build)))
        yield


@cache
def _headers_in(place: Path) -> Any:
    """Inductor's cached function that makes a precompiled header; None if inductor lacks it."""
    from torch._inductor import codecache

    known = hasattr(codecache, "_HEADER_DIR") and hasattr(codecache, "_HEADER_LOCK_DIR")
    make = getattr(getattr(codecache, "_precompile_header", None), "__wrapped__", None)
    return cache(make) if known and make is not None else None


@cache
def _builder(build: Callable[[Any], None]) -> type:
    from torch._inductor.cpp_builder import CppBuilder

    class Builder(CppBuilder):
        def build(self) -> None:
            build(self)

    return Builder


def library_of(text: str, flags: Sequence[str] = ()) -> Path:
    """Compile and load C++ with further compiler flags, and return its library."""
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    with config.patch(INSTRUCTIONS):
        return Path(CppCodeCache.load(text, extra_flags=flags)._name)


def code_of(graph: Graph, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    """Compile a graph by inductor to code that maps a list of tensors to tensors.

    Args:
        graph: operations of ATen.
        inputs: fake tensors with the shapes, strides and types of the code's inputs.
        options: inductor's settings.

    Returns:
        Inductor's compiled graph; Python adds its `constants` to the inputs, and `current_callable` runs it.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    codes: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        codes.append(compile_fx_inner(*args, **kwargs))
        return codes[-1]

    # AOTAutograd's cache would return code that has not passed through `inner`; inductor's own cache is used.
    with functorch_config.patch(enable_autograd_cache=False), torch.no_grad():
        compile_fx(GraphModule({}, graph), inputs, inner, config_patches=dict(options))
    (code,) = codes
    return code
