"""Compiled code is in a folder of this user, to which nobody else can write: the first of several that can be had."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_specdec.prepared import code_folder, code_on_disk
from hf_specdec.prepared.code_folder import Folders, NoFolderError, folders_named

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes of files")


def _places(folders: Folders) -> list[str]:
    """The kinds of the readable folders, see `disk`."""
    return [folder.parent.parent.name for folder in folders.readable]


def test_it_is_in_torchs_folder_and_closed_to_others(disk: Path) -> None:
    before = os.umask(0)
    try:
        found = folders_named("code")
    finally:
        os.umask(before)
    assert found.readable == (disk / "torch" / "hf_specdec" / "code",) and found.writable == found.readable[0]
    for folder in (found.readable[0], found.readable[0].parent, disk / "torch"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
@pytest.mark.parametrize("which", ["torch", "torch/hf_specdec", "torch/hf_specdec/code"])
def test_one_that_others_can_write_to_is_not_used(mode: int, which: str, disk: Path) -> None:
    folder = disk / which
    folder.mkdir(mode=0o700, parents=True)
    folder.chmod(mode)
    # In a folder like that of temporary files nobody can exchange a folder of ours, but put one in its place before.
    expected = "torch" if mode == 0o1777 and not which.endswith("code") else "cache"
    assert _places(folders_named("code")) == [expected]
    assert expected == "torch" or not any(folder.iterdir()), "nothing is put there"


def test_neither_is_a_link_to_one(disk: Path) -> None:
    (disk / "open").mkdir()
    (disk / "open").chmod(0o777)
    (disk / "torch").symlink_to(disk / "open")
    assert _places(folders_named("code")) == ["cache"]


def test_one_of_another_user_is_not_used(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders_named("code")
    monkeypatch.setattr(code_folder.os, "getuid", lambda: 2**20)
    folders_named.cache_clear()
    found = folders_named("code")
    assert found.readable == () and found.writable is None
    monkeypatch.setattr(code_on_disk, "_folders", lambda: found)
    with pytest.raises(
        NoFolderError, match=r"belongs to another user.*; .*\. Set TORCHINDUCTOR_CACHE_DIR to a folder of"
    ):
        code_on_disk.workplace()


@pytest.mark.parametrize("reason", ["read-only", "full", "noexec", "a file", "a space", "a quote"])
def test_where_one_takes_no_code_another_one_does(reason: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = disk / {"a space": "tor ch", "a quote": "tor'ch"}.get(reason, "torch")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(torchs))
    access, asked = os.access, os.statvfs
    about = {"f_flag": os.ST_NOEXEC if reason == "noexec" else 0, "f_blocks": 1, "f_frsize": 2**12, "f_bavail": 2**20}
    if reason == "read-only":
        monkeypatch.setattr(
            code_folder.os, "access", lambda path, mode: torchs not in path.parents and access(path, mode)
        )
    elif reason == "a file":
        torchs.write_text("in the way")
    elif reason in ("full", "noexec"):
        left = {"full": 2**12}.get(reason, 2**20)
        special = SimpleNamespace(**{**about, "f_bavail": left})
        monkeypatch.setattr(code_folder.os, "statvfs", lambda path: special if torchs in path.parents else asked(path))
    found = folders_named("code")
    # What lies there already can be loaded, unless nothing can be.
    assert _places(found) == ([] if reason in ("noexec", "a file") else [torchs.name]) + ["cache"]
    assert found.writable == disk / "cache" / "hf_specdec" / "code"
    (refusal,) = found.refused
    assert refusal.startswith(str(torchs))


def test_the_last_resort_is_a_folder_among_temporary_files(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "cache"):
        (disk / name).write_text("in the way")
    (disk / "temporary").chmod(0o1777)
    assert folders_named("code").writable == disk / "temporary" / f"hf_specdec_{os.getuid()}" / "code"


def test_it_is_looked_up_once_a_process(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = folders_named("code")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(disk / "other"))
    assert folders_named("code") == before
