"""Compiled code that earlier processes left on disk, loaded without inductor, whose import takes seconds and memory.

Torch's own folder for compiled code holds a link for each piece, named by a hash of what the piece was compiled for, to
the library that inductor wrote. Where torch lacks the functions that this looks up, inductor finds code in its own
cache, or compiles it.
"""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specdec.models.processor import reported
from hf_specdec.prepared.cpp_compiler import OPTIONS

Code = Callable[[list[Any]], Sequence[Any]]  # as inductor's; empties the list that it is given

_ENTRY = "inductor_entry_cpp"  # inductor's name for the function of a library
_FUNCTION = "_Z19inductor_entry_implPP16AtenTensorOpaqueS1_"  # what that calls, as C++ names it
_POINTERS = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # where a library looks up a function of torch when it is loaded


def library_for(what: Hashable) -> Path | None:
    """The library that was compiled for this: any value whose `repr` says all that the code depends on."""
    link = _link(what)
    return link.resolve() if link.exists() else None


def code_for(what: Hashable) -> Code | None:
    """The code in the library of inductor's C++ that was compiled for this."""
    library = library_for(what)
    try:
        return None if library is None else _code_in(library)
    except (ImportError, OSError):  # a file that was cut short, a folder from which nothing may be run
        return None


def keep(what: Hashable, library: Path) -> None:
    """Let later processes find a library; where the folder can't be written to, they compile."""
    link = _link(what)
    ours = link.with_name(f"{link.name}.{os.getpid()}")
    with suppress(OSError):
        link.parent.mkdir(parents=True, exist_ok=True)
        ours.symlink_to(library)
        ours.replace(link)


def any_kept() -> bool:
    """Whether any process has kept code that this one could load."""
    return _folder().is_dir()


def conversions() -> tuple[Callable[[list[Tensor]], list[Any]], Callable[[Any], Sequence[Tensor]]] | None:
    """Torch's functions from tensors to handles of its C interface, in capsules, and back; None where it lacks them."""
    interface = getattr(torch._C, "_aoti", None)
    handles_of = getattr(interface, "unsafe_alloc_void_ptrs_from_tensors", None)
    tensors_of = getattr(interface, "alloc_tensors_by_stealing_from_void_ptrs", None)
    return None if handles_of is None or tensors_of is None else (handles_of, tensors_of)


def function_in(library: Path) -> int | None:
    """The address of the function in a library of inductor's C++ that takes and returns handles; None without one."""
    function = getattr(ctypes.PyDLL(str(library)), _FUNCTION, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


def _code_in(library: Path) -> Code | None:
    """None where torch lacks what it takes to load and call it."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    pointers = getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", None)
    between = conversions()
    if between is None or pointers is None:
        return None
    handles_of, tensors_of = between
    os.environ[_POINTERS] = str(pointers)
    loader = ExtensionFileLoader(f"{__name__}.{library.stem}.{_ENTRY}", str(library))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    run = getattr(module, _ENTRY)

    def code(tensors: list[Tensor]) -> Sequence[Tensor]:
        handles = handles_of(tensors)
        tensors.clear()
        return tensors_of(run(handles))

    return code


def _link(what: Hashable) -> Path:
    return _folder() / f"{_digest(what)}.so"


def _folder() -> Path:
    """Where links for this processor, Python and torch are; as `torch._inductor.runtime.cache_dir_utils` has it.

    Importing that module takes as long as a third of inductor.
    """
    made_for = torch.__version__, torch.version.git_version, sys.implementation.cache_tag, reported("flags"), OPTIONS
    base = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if base is None:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        base = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return Path(base).absolute() / "hf_specdec" / _digest(made_for)


def _digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]
