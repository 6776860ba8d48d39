"""The journal, and runs that are broken off: nothing measured is lost, and the end is the same."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.script import SCRIPT, load_script

from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage.journal import Journal, discard, parts
from hf_specdec.bench.storage.results import stem
from hf_specdec.bench.tasks.decode import run_decode

ARGUMENTS = {"max_new_tokens": 8, "draft_models": ("a", "b")}


def opened(folder: Path, arguments: dict[str, Any] = ARGUMENTS, rank: int = 0) -> Journal:
    journal = Journal(folder, "run", arguments, rank)
    journal.begin(environment={})
    return journal


def test_a_start_that_measured_nothing_binds_nobody(tmp_path: Path) -> None:
    opened(tmp_path)
    assert list(tmp_path.iterdir()) == []
    opened(tmp_path, ARGUMENTS | {"max_new_tokens": 9}).append({"kind": "x"})


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
    journals = [opened(tmp_path, rank=rank) for rank in (0, 1, 5)]
    for journal, number in zip(journals[:2], (0, 1), strict=True):
        journal.append({"kind": "x", "number": number})
    assert [record["number"] for record in Journal(tmp_path, "run", ARGUMENTS).records] == [0, 1]
    assert len(parts(tmp_path, "run")) == 2
    discard(tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


def test_each_line_is_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    journal = opened(tmp_path)
    journal.append({"kind": "x"})
    # The header comes with the first record.
    assert synced[-1] == journal.path.stat().st_size and len(synced) == 2


def test_other_arguments_are_refused_by_name(tmp_path: Path) -> None:
    opened(tmp_path).append({"kind": "x"})
    with pytest.raises(BenchError, match="max_new_tokens=8, which is now 9; give the same arguments"):
        Journal(tmp_path, "run", ARGUMENTS | {"max_new_tokens": 9})


def test_a_damaged_or_unreadable_journal_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    journal.append({"kind": "x"})
    path = journal.path
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        with pytest.raises(BenchError, match=r"can't be read \(Permission denied\); make it readable"):
            Journal(tmp_path, "run", ARGUMENTS)
    path.write_text(path.read_text() + "not JSON\n")
    with pytest.raises(BenchError, match=r"line 3 of .* is damaged; delete that file"):
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


def test_a_disk_too_full_for_the_result_loses_nothing(
    saved_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = map(str, saved_pair)
    asked_for = Settings(
        task="decode", model_name=target, assistant_model=draft, assisted_generation=True, max_new_tokens=8,
        repeats=2, do_sample=True, prompts=("One", "Two"), output_dir=tmp_path,
    )  # fmt: skip
    written = tmp_path / f"{stem(asked_for)}.json"
    written.write_text("an earlier result")

    def full(self: Path, text: str, encoding: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(BenchError, match=r"writing to .* failed \(No space left on device\); give a folder") as end:
            run_decode(asked_for)
    assert "\n" not in str(end.value) and written.read_text() == "an earlier result"
    (journal,) = parts(tmp_path, stem(asked_for))
    seconds = [json.loads(line).get("seconds") for line in journal.read_text().splitlines()][1:]
    run_decode(asked_for)
    assert [run["seconds"] for run in json.loads(written.read_text())["runs"]] == seconds and len(seconds) == 4


# Each draws its tokens, and is long enough to be killed several times.
LINES = {
    "subtasks": "--task subtasks --limit 1 --repeats 2",
    "benchmark": "--task benchmark --prompt_lengths 20 30 --repeats 2",
    "decode": "--task decode --repeats 4",
}
STEMS = {"subtasks": "subtasks-sampling"} | {task: f"{task}-speculative-sampling" for task in ("benchmark", "decode")}


def arguments(task: str, pair: tuple[Path, Path], folder: Path) -> list[str]:
    models = ["--model_name", str(pair[0]), "--assistant_model", str(pair[1]), "--device", "cpu"]
    return [
        *LINES[task].split(), *models, "--assisted_generation", "--do_sample", "--max_new_tokens", "8",
        "--output_dir", str(folder),
    ]  # fmt: skip


def run(task: str, pair: tuple[Path, Path], folder: Path) -> dict[str, Any]:
    """Runs a task to its end, in this process; returns the result."""
    assert load_script().main(arguments(task, pair, folder)) == 0
    result: dict[str, Any] = json.loads((folder / f"{STEMS[task]}.json").read_text())
    return result


def kill_after(records: int, delay: float, task: str, pair: tuple[Path, Path], folder: Path) -> None:
    """Starts a task as a user does, and kills it `delay` seconds after its journal has so many lines."""
    with open(folder.parent / "killed.txt", "a+") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments(task, pair, folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        try:
            while process.poll() is None and len(lines_of(task, folder)) < records:
                time.sleep(0.001)
            time.sleep(delay)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        assert process.returncode < 0, f"ended before it was killed:\n{output.read()}"


def lines_of(task: str, folder: Path) -> list[bytes]:
    """The whole lines of a journal; a torn one is left out."""
    return [line for path in parts(folder, STEMS[task]) for line in path.read_bytes().split(b"\n")[:-1]]


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same in every run."""
    result = json.loads(json.dumps(result))
    for run in result["runs"]:
        del run["seconds"], run["puts"]
        for item in run["rounds"] or ():
            for key in ("draft_seconds", "verify_seconds", "seconds"):
                del item[key]
    shapes = {length: counts(forwards) for length, forwards in result["raw_forwards"].items()}
    kept = ("prompts", "runs", "quality", "methods", "notes")
    return {key: result[key] for key in kept if key in result} | {"forwards": shapes}


def counts(forwards: dict[str, Any]) -> list[int]:
    """How many times were taken of each kind."""
    return [len(forwards["draft_step"]), *(len(times) for times in forwards["target"].values())]


@pytest.mark.parametrize(("task", "kills"), [("subtasks", 2), ("benchmark", 1), ("decode", 1)])
def test_killed_at_any_point_it_ends_with_the_same_table(
    saved_pair: tuple[Path, Path], tmp_path: Path, task: str, kills: int
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(task, saved_pair, whole)
    seed = 14
    print("seed", seed)
    rng = random.Random(seed)
    broken.mkdir()
    kept = []
    # In the first half, so that a process that this one looks at late is not done yet.
    for records in sorted(rng.sample(range(2, len(expected["runs"]) // 2), kills)):
        kill_after(records, rng.random() * 0.01, task, saved_pair, broken)
        kept.append(len(lines_of(task, broken)))
        assert kept[-1] >= records
    assert kept == sorted(kept)
    before = [json.loads(line) for line in lines_of(task, broken)]
    result = run(task, saved_pair, broken)
    assert without_times(result) == without_times(expected)
    # Times of what was measured before the kills are the ones in the result, so nothing was measured twice.
    seconds = {(r["repeat"], r["prompt"], r["method"]): r["seconds"] for r in result["runs"]}
    runs = [record for record in before if record["kind"] == "run"]
    assert runs and all(seconds[r["repeat"], r["prompt"], r["method"]] == r["seconds"] for r in runs)
    assert parts(broken, STEMS[task]) == []


def interrupt_after(
    records: int, task: str, pair: tuple[Path, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C once the journal has so many records."""
    append = Journal.append

    def appended(self: Journal, record: dict[str, Any]) -> None:
        append(self, record)
        if len(self.records) == records:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", appended)
        assert load_script().main(arguments(task, pair, folder)) == 130


def test_what_was_decoded_before_is_shown_again(
    saved_pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt_after(4, "decode", saved_pair, tmp_path, monkeypatch)
    assert "the same command continues it" in capsys.readouterr().err
    run("decode", saved_pair, tmp_path)
    again = capsys.readouterr().out.split("# Decode")[0]
    run("decode", saved_pair, tmp_path)
    assert capsys.readouterr().out.split("# Decode")[0] == again and again.count("--- ") == 8


def test_a_restart_with_other_arguments_is_refused(
    saved_pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt_after(3, "subtasks", saved_pair, tmp_path, monkeypatch)
    capsys.readouterr()
    assert load_script().main([*arguments("subtasks", saved_pair, tmp_path), "--seed", "1"]) == 1
    assert "seed=0, which is now 1" in capsys.readouterr().err
