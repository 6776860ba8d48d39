"""Runs inductor's compiler in a private folder, with a time limit, and only for code that no process has compiled.

Inductor's default folder is in a place that users share, and it loads whatever it finds there.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_specdec.compat import inductor
from hf_specdec.host.caller import warn_caller
from hf_specdec.prepared import code_on_disk
from hf_specdec.prepared.code_folder import NoFolderError

ANSWER, LONGEST = 30, 600  # seconds for the compiler's version, and for compiling a library on a busy machine

_KEPT = (".so", ".gch", ".pch")  # libraries and precompiled headers, whose names derive from their sources
_OTHER_COMPILER = "Install g++, or set CXX to a C++ compiler"

_lock = threading.Lock()
_blocks: set[object] = set()  # the running `in_own_folder` blocks
_changes = ExitStack()
_hanging: set[str] = set()  # compilers that exceeded a time limit
_told: set[str] = set()


class CompilerError(RuntimeError):
    """A compiler's failure; the message says why, and the way out."""


def tell_going_without(what: str, error: BaseException) -> None:
    """Warn, once per process, that calls go on without something that could not be prepared."""
    error = getattr(error, "inner_exception", error)  # inductor wraps errors
    cause = next(iter(str(error).strip().splitlines()), "")
    kind = "" if isinstance(error, (CompilerError, NoFolderError)) else f"{type(error).__name__}: "
    tell_once(f"{what}: decoding goes on without, since preparing failed: {kind}{cause}")


def tell_once(sentence: str) -> None:
    """Warn the caller, once per process."""
    if sentence not in _told:
        _told.add(sentence)
        warn_caller(sentence)


@contextmanager
def in_own_folder(device: torch.device) -> Iterator[None]:
    """Make inductor compile in our folder within this block, also in other threads.

    Raises:
        NoFolderError: there is no folder for it.
        CompilerError: there is no compiler for a CPU.
    """
    inductor.keep_imported()
    on_cpu = device.type == "cpu"
    if on_cpu:
        _find_compiler()
    place = code_on_disk.workplace() if on_cpu else code_on_disk.lasting_place()
    block = object()
    try:
        _enter(block, place, on_cpu)
        yield
    finally:
        _leave(block)


def _enter(block: object, place: Path, on_cpu: bool) -> None:
    """Set up a block; if this is interrupted, `_leave` restores everything."""
    with _lock:
        if not _blocks:
            _changes.enter_context(_environment(TORCHINDUCTOR_CACHE_DIR=str(place)))
            if on_cpu:
                _changes.enter_context(inductor.building(place, _build))
            else:
                _changes.enter_context(_environment(TRITON_CACHE_DIR=str(place / "triton")))
        _blocks.add(block)


def _leave(block: object) -> None:
    with _lock:
        _blocks.discard(block)
        if not _blocks:
            _changes.close()


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _build(builder: Any) -> None:
    """Compile, unless a process has stored the result of the same source and command."""
    target, command = Path(builder.get_target_file_path()), shlex.split(builder.get_command_line())
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix not in _KEPT:
        _run(command, target.parent, LONGEST)
        return
    with code_on_disk.one_at_a_time(target.name):
        if not code_on_disk.take(target.name, target):
            _run(command, target.parent, LONGEST)
            code_on_disk.keep(target.name, target)


def _find_compiler() -> None:
    compiler = inductor.compiler()
    if compiler is not None:
        _answer_of(compiler)


@cache
def _answer_of(compiler: str) -> None:
    _run([compiler, "--version"], Path.cwd(), ANSWER)


def _run(command: list[str], folder: Path, seconds: int) -> None:
    """Run a compiler in a folder, also for its temporary files, since the usual folder for these may be full.

    Raises:
        CompilerError: it is missing, fails, or exceeds the time limit, after which it is not tried again.
    """
    compiler = command[0]
    try:
        if compiler in _hanging:
            raise subprocess.TimeoutExpired(command, seconds)
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        settings = {**os.environ, "TMPDIR": str(folder)}
        subprocess.run(command, cwd=folder, env=settings, check=True, timeout=seconds, **streams)
    except subprocess.TimeoutExpired as error:
        _hanging.add(compiler)
        raise CompilerError(f"{compiler} did not finish within {seconds} seconds. {_OTHER_COMPILER}") from error
    except subprocess.CalledProcessError as error:
        raise CompilerError(f"{compiler} failed: {_said(error.stdout, folder)}") from error
    except OSError as error:
        raise CompilerError(f"{compiler} can't be run ({error.strerror}). {_OTHER_COMPILER}") from error


def _said(output: bytes, folder: Path) -> str:
    """The line of a compiler's output that names the error, or the way out for a full disk."""
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()] or ["no message"]
    if any("No space left on device" in line for line in lines):
        return f"no space is left in {folder}. Free some, or set TORCHINDUCTOR_CACHE_DIR to a folder with more"
    return next((line for line in lines if "error" in line), lines[-1])
