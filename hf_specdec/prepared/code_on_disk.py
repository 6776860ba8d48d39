"""Compiled code that processes share on disk, and how to load it.

A loaded library can do anything that its process can. So it is loaded only from a folder of this user alone, and only
unchanged: a record, named by what was compiled, holds the library's digest, which is also the library's name. A
truncated, damaged or replaced library is compiled again. Loading needs no inductor, whose import takes seconds and
memory; if torch lacks the functions needed here, code is compiled.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specdec.compat.inductor import OPTIONS
from hf_specdec.compat.torch_private import conversions, tensor_pointer_function
from hf_specdec.models.processor import reported
from hf_specdec.prepared.code_folder import Folders, NoFolderError, folders_named, is_ours_alone

Code = Callable[[list[Any]], Sequence[Any]]  # like inductor's; empties the given list

WAIT = 300  # seconds to wait for another process that compiles the same

_NAME = re.compile(r"(?P<digest>[0-9a-f]{64})\.\w+")  # of a library
_PROCESSOR = ("model name", "flags", "CPU part", "Features")  # x86 has the first two, ARM the others
_WORKPLACE = "at-work-"
_STALE = 86400  # seconds without use after which a workplace is assumed to be of a killed process

_ENTRY = "inductor_entry_cpp"  # inductor's name for the function of a library
_POINTERS = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # the variable by which a library finds a function of torch

_workplaces: dict[int, Path] = {}  # by process, since a forked child must not use its parent's


def library_for(what: Hashable) -> Path | None:
    """The unchanged library compiled for `what`, any value whose `repr` says all that the code depends on."""
    # Without a compiler, code of any compiler is better than none.
    pattern = _record(what) if _compiler() is not None else f"{_digest(what)}-*"
    for folder in _folders().readable:
        for record in folder.glob(pattern):
            name = b"".join(_parts_of(record)).decode(errors="replace")
            known = _NAME.fullmatch(name)
            if known and _digest_of(folder / name) == known["digest"]:
                return folder / name
    return None


def keep(what: Hashable, library: Path) -> None:
    """Let later processes find a library; if it cannot be stored, they compile."""
    with suppress(OSError):
        library.chmod(0o700)
        name = f"{_digest_of(library)}{library.suffix}"
        if _digest_of(_folder() / name) != name.partition(".")[0]:
            _put(lambda new: _copy(library, new), _folder() / name)
        _put(lambda new: new.write_text(name), _folder() / _record(what))


def take(what: Hashable, place: Path) -> bool:
    """Copy the library compiled for `what` to `place`; return whether there is one."""
    library = library_for(what)
    if library is not None:
        place.unlink(missing_ok=True)
        _copy(library, place)
    return library is not None


def any_kept() -> bool:
    """Whether any process has stored code that this one could load."""
    return any(True for folder in _folders().readable for _ in folder.glob("*.so"))


def workplace() -> Path:
    """A private folder of this process to compile in, removed when the process ends.

    Raises:
        NoFolderError: there is none.
    """
    place = _workplaces.get(os.getpid())
    if place is None or not place.is_dir():
        for old in _folder().glob(f"{_WORKPLACE}*"):
            with suppress(OSError):
                if time.time() - old.stat().st_mtime > _STALE:
                    shutil.rmtree(old)
        place = Path(tempfile.mkdtemp(prefix=_WORKPLACE, dir=_folder()))
        _workplaces[os.getpid()] = place
        atexit.register(_remove, place, os.getpid())
    os.utime(place)
    return place


def lasting_place() -> Path:
    """A folder that inductor manages, for code of other devices than a CPU.

    Raises:
        NoFolderError: there is none.
    """
    return _folder() / "inductor"


@contextmanager
def one_at_a_time(what: Hashable) -> Iterator[None]:
    """Wait until no other process compiles this, at most for `WAIT`; don't wait on a disk without locks."""
    from filelock import FileLock

    lock = FileLock(_folder() / f"{_digest(what)}.lock", timeout=WAIT)
    try:
        lock.acquire()
    except (OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def code_for(what: Hashable) -> Code | None:
    """Load the code compiled by inductor for `what`; None if there is none."""
    library = library_for(what)
    try:
        return None if library is None else _code_in(library)
    except (ImportError, OSError):  # a library that it is linked to is gone
        return None


def _code_in(library: Path) -> Code | None:
    """Load a library's code; None if torch lacks the functions to load and call it."""
    pointers, between = tensor_pointer_function(), conversions()
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


def _folder() -> Path:
    """The writable folder.

    Raises:
        NoFolderError: there is none.
    """
    folders = _folders()
    if folders.writable is None:
        raise NoFolderError(
            f"there is no folder for compiled code ({'; '.join(folders.refused)}). "
            "Set TORCHINDUCTOR_CACHE_DIR to a folder of your own that nobody else can write to"
        )
    return folders.writable


def _folders() -> Folders:
    return folders_named(_made_for())


@cache
def _made_for() -> str:
    """The digest of everything that all code depends on, including the instructions in use."""
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("TORCHINDUCTOR_CPP_")}
    processor = [torch.backends.cpu.get_cpu_capability(), *(reported(name) for name in _PROCESSOR)]
    return _digest(
        (torch.__version__, torch.version.git_version, sys.implementation.cache_tag, processor, settings, OPTIONS)
    )


def _compiler() -> str | None:
    """The C++ compiler, identified by its file, since asking it takes time and may hang; None without one."""
    file = shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))
    if file is None:
        return None
    file = os.path.realpath(file)
    return f"{file!r} of {os.stat(file).st_size} bytes"


def _digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


def _record(what: Hashable) -> str:
    """The name of the record for the compiler in use."""
    return f"{_digest(what)}-{_digest(_compiler())}"


def _digest_of(file: Path) -> str | None:
    digest = None
    for part in _parts_of(file):
        digest = digest or hashlib.sha256()
        digest.update(part)
    return None if digest is None else digest.hexdigest()


def _parts_of(file: Path) -> Iterator[bytes]:
    """Yield the contents of a file of this user alone; nothing of a link, a folder, or a pipe, which may never end.

    They are read, not mapped: accessing a mapping past the end of a truncated file would end the process.
    """
    with suppress(OSError):
        about = file.lstat()
        if stat.S_ISREG(about.st_mode) and is_ours_alone(about):
            with file.open("rb") as opened:
                while part := opened.read(2**20):
                    yield part


def _put(write: Callable[[Path], Any], place: Path) -> None:
    """Write a file atomically, replacing whatever was there."""
    with tempfile.TemporaryDirectory(dir=workplace()) as folder:
        new = Path(folder, "new")
        write(new)
        new.chmod(0o700)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        new.replace(place)


def _copy(file: Path, place: Path) -> None:
    try:
        place.hardlink_to(file)
    except OSError:  # the disk has none
        shutil.copyfile(file, place)


def _remove(place: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(place, ignore_errors=True)
