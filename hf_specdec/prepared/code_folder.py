"""Finds the folder for compiled code: one of this user, to which nobody else can write."""

from __future__ import annotations

import os
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOM = 2**28  # bytes that must be free in the folder; a precompiled header takes 150 MB
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NoFolderError(OSError):
    """No folder for compiled code; the message says why, and the way out."""


@dataclass(frozen=True)
class Folders:
    """Folders for compiled code.

    Args:
        readable: the folders from which code may be loaded, in order.
        writable: the last of them, to which code can be added; None if there is none.
        refused: what is wrong with others.
    """

    readable: tuple[Path, ...]
    writable: Path | None
    refused: tuple[str, ...]


@cache
def folders_named(name: str) -> Folders:
    """The folders of a name, created if missing, up to the first that is writable.

    Looked up once per process, since compiling changes the environment.
    """
    readable: list[Path] = []
    refused: list[str] = []
    for parent in _parents():
        folder = Path(os.path.realpath(parent), name)
        try:
            reason = _who_else_writes_to(folder)
            if reason is None:
                _make(folder)
                reason = _who_else_writes_to(folder) or _why_nothing_runs_in(folder)
            if reason is None:
                readable.append(folder)
                reason = _why_not_to_write_to(folder)
        except OSError as error:
            reason = f"can't be used ({error.strerror})"
        if reason is None:
            return Folders(tuple(readable), folder, tuple(refused))
        refused.append(f"{parent} {reason}")
    return Folders(tuple(readable), None, tuple(refused))


def is_ours_alone(about: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user and nobody else can write to it."""
    return sys.platform == "win32" or (about.st_uid == os.getuid() and not about.st_mode & _OTHERS_WRITE)


def _parents() -> Iterator[Path]:
    """torch's folder for compiled code, the user's cache, and the folder for temporary files."""
    user = os.getuid() if sys.platform != "win32" else "user"
    torchs, cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    places = (torchs or "", cache or os.path.expanduser("~/.cache"))
    yield from (Path(place, "hf_specdec") for place in places if os.path.isabs(place))
    yield Path(tempfile.gettempdir(), f"hf_specdec_{user}")


def _make(folder: Path) -> None:
    for missing in [part for part in (folder, *folder.parents) if not part.exists()][::-1]:
        missing.mkdir(mode=0o700, exist_ok=True)


def _who_else_writes_to(folder: Path) -> str | None:
    """Describe who else could replace files: anyone who can write to the folder, or rename a parent folder."""
    if sys.platform == "win32":  # users' folders are private there
        return None
    if folder.exists() and not is_ours_alone(folder.stat()):
        return "belongs to another user or can be written to by one"
    trusted = {0, os.getuid(), os.stat("/").st_uid}
    for part in (part for part in folder.parents if part.exists()):
        about = part.stat()
        if about.st_uid not in trusted or (about.st_mode & _OTHERS_WRITE and not about.st_mode & stat.S_ISVTX):
            return f"is in {part}, which another user can write to"
    return None


def _why_nothing_runs_in(folder: Path) -> str | None:
    flags = 0 if sys.platform == "win32" else os.statvfs(folder).f_flag
    return "is mounted noexec" if flags & getattr(os, "ST_NOEXEC", 0) else None


def _why_not_to_write_to(folder: Path) -> str | None:
    if not os.access(folder, os.W_OK | os.X_OK):
        return "is read-only"
    if shlex.quote(str(folder)) != str(folder):
        return "has characters in its name that inductor does not quote"
    if sys.platform != "win32":
        disk = os.statvfs(folder)
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < ROOM:
            return f"has less than {ROOM >> 20} MB of free space"
    return None
