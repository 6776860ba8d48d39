"""The journal, and runs that are broken off: nothing measured is lost, and the end is the same."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import save_pair

from hf_specdec.bench import journal as journal_room
from hf_specdec.bench.journal import Journal, discard, parts
from hf_specdec.bench.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.subtasks import run_subtasks

ARGUMENTS = {"max_new_tokens": 8, "draft_models": ("a", "b")}


def opened(folder: Path, arguments: dict[str, Any] = ARGUMENTS, rank: int = 0) -> Journal:
    journal = Journal(folder, "run", arguments, rank)
    journal.begin(environment={})
    return journal


def test_records_come_back_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    assert not journal.resumed
    for number in range(3):
        journal.append({"kind": "x", "number": number})
    journal.close()
    with open(journal.path, "ab") as file:
        file.write(b'{"kind": "x", "num')
    again = opened(tmp_path)
    assert again.resumed and [record["number"] for record in again.records] == [0, 1, 2]
    again.append({"kind": "x", "number": 3})
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["header", "x", "x", "x", "x"]


def test_any_process_continues_what_others_began(tmp_path: Path) -> None:
    for rank in (0, 1):
        opened(tmp_path, rank=rank).append({"kind": "x", "number": rank})
    opened(tmp_path, rank=5)
    assert [record["number"] for record in Journal(tmp_path, "run", ARGUMENTS).records] == [0, 1]
    assert len(parts(tmp_path, "run")) == 3
    discard(tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


def test_each_line_is_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    journal = opened(tmp_path)
    journal.append({"kind": "x"})
    assert synced[-1] == journal.path.stat().st_size and len(synced) == 2


def test_other_arguments_are_refused_by_name(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(BenchError, match="max_new_tokens=8, which is now 9; give the same arguments"):
        Journal(tmp_path, "run", ARGUMENTS | {"max_new_tokens": 9})


def test_a_damaged_or_unreadable_journal_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = opened(tmp_path).path
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        with pytest.raises(BenchError, match=r"can't be read \(Permission denied\); make it readable"):
            Journal(tmp_path, "run", ARGUMENTS)
    path.write_text(path.read_text() + "not JSON\n")
    with pytest.raises(BenchError, match=r"line 2 of .* is damaged; delete that file"):
        Journal(tmp_path, "run", ARGUMENTS)


def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.append({"kind": "x", "number": 0})
    file = journal._file

    class Full:
        """Takes a part of the line and then nothing, as a disk does when it is full."""

        def write(self, line: bytes) -> int:
            assert file is not None
            file.write(line[:5])
            raise OSError(errno.ENOSPC, "No space left on device")

    journal._file = Full()  # type: ignore[assignment]
    with pytest.raises(BenchError, match=r"No space left on device\); what was measured before is kept"):
        journal.append({"kind": "x", "number": 1})
    assert [record["number"] for record in opened(tmp_path).records] == [0]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("journal")
    target, draft = save_pair(folder)
    return Settings(
        task="subtasks", model_name=str(target), assistant_model=str(draft), assisted_generation=True, limit=1,
        max_new_tokens=8, repeats=2, do_sample=True, output_dir=folder / "whole",
    )  # fmt: skip


def without_times(folder: Path) -> dict[str, Any]:
    """What has to be the same in every run."""
    result = json.loads((folder / "subtasks-sampling.json").read_text())
    for run in result["runs"]:
        del run["seconds"], run["puts"]
        for item in run["rounds"] or ():
            for key in ("draft_seconds", "verify_seconds", "seconds"):
                del item[key]
    return {key: result[key] for key in ("prompts", "runs", "quality", "methods", "notes")}


def start_and_kill(settings: Settings, records: int, delay: float) -> bool:
    """Kills a run some time after its journal has so many lines; returns whether it was still running."""
    process = multiprocessing.get_context("fork").Process(target=run_subtasks, args=(settings, Processes()))
    process.start()
    while process.is_alive() and count_lines(settings.output_dir) < records:
        process.join(0.001)
    process.join(delay)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


def count_lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in parts(folder, "subtasks-sampling"))


def test_killed_at_random_points_it_ends_with_the_same_table(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_subtasks(settings, Processes())
    whole = without_times(settings.output_dir)
    total = len(whole["runs"]) + len(whole["prompts"])
    broken = Settings(**vars(settings) | {"output_dir": tmp_path})
    tmp_path.mkdir(exist_ok=True)
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    kept = []
    for records in sorted(rng.sample(range(2, total - 5), 3)):
        assert start_and_kill(broken, records, rng.random() * 0.01)
        kept.append(count_lines(tmp_path))
    assert kept == sorted(kept) and kept[0] >= 2
    before = journal_room.Journal(tmp_path, "subtasks-sampling", kept_arguments(broken)).records
    run_subtasks(broken, Processes())
    assert without_times(tmp_path) == whole
    # Times of what was measured before the kills are the ones in the result, so nothing was measured twice.
    result = json.loads((tmp_path / "subtasks-sampling.json").read_text())
    seconds = {(r["repeat"], r["prompt"], r["method"]): r["seconds"] for r in result["runs"]}
    runs = [record for record in before if record["kind"] == "run"]
    assert runs and all(seconds[r["repeat"], r["prompt"], r["method"]] == r["seconds"] for r in runs)
    assert parts(tmp_path, "subtasks-sampling") == []


def kept_arguments(settings: Settings) -> dict[str, Any]:
    return {key: value for key, value in settings.to_dict().items() if key != "output_dir"}


def test_a_restart_with_other_arguments_is_refused(settings: Settings, tmp_path: Path) -> None:
    broken = Settings(**vars(settings) | {"output_dir": tmp_path})
    assert start_and_kill(broken, 3, 0.0)
    with pytest.raises(BenchError, match="seed=0, which is now 1"):
        run_subtasks(Settings(**vars(broken) | {"seed": 1}), Processes())
