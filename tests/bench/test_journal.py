"""The journal and interrupted runs: nothing measured is lost, and the result is the same."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.script import SCRIPT, load_script

from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_call import Call
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import environment, results
from hf_specdec.bench.storage.journal import Journal, discard
from hf_specdec.bench.storage.run_session import RunSession, key_of

KILLS = int(os.environ.get("HF_SPECDEC_KILLS", "2"))
ARGUMENTS = {"max_new_tokens": 8, "draft_models": ("a", "b")}


def opened(folder: Path, arguments: dict[str, Any] = ARGUMENTS) -> Journal:
    journal = Journal(folder, "run", arguments)
    journal.begin(environment={})
    return journal


def numbers(journal: Journal) -> list[int]:
    return [record["number"] for record in journal.records]


def test_a_start_that_measured_nothing_binds_nobody(tmp_path: Path) -> None:
    opened(tmp_path)
    assert list(tmp_path.iterdir()) == []
    opened(tmp_path, ARGUMENTS | {"max_new_tokens": 9}).append({"number": 0})


def test_records_come_back_and_one_that_is_half_written_does_not(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for number in range(3):
        journal.append({"number": number})
    assert journal._file is not None
    journal._file.execute("INSERT INTO records (record) VALUES ('{\"number\": 3}')")
    journal._file.close()
    again = opened(tmp_path)
    assert numbers(again) == [0, 1, 2]
    again.append({"number": 3})
    assert numbers(opened(tmp_path)) == [0, 1, 2, 3]


def test_the_header_is_that_of_the_start_which_measured_first(tmp_path: Path) -> None:
    for place in ("here", "there"):
        journal = Journal(tmp_path, "run", ARGUMENTS)
        journal.begin(environment=place)
        journal.append({"number": 0})
    assert Journal(tmp_path, "run", ARGUMENTS).header["environment"] == "here"


def test_a_start_elsewhere_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("cpu", "instructions", "gpus", "packages", "torch_threads", "commit", "busy_cores", "date")
    here = dict.fromkeys(names, "here")
    monkeypatch.setattr(environment, "busy_cores", lambda: 0.0)
    for name in here:
        settings, notes = Settings(output_dir=tmp_path / name), []
        for there in ({}, {name: "there"}):
            monkeypatch.setattr(environment, "describe", lambda there=there: here | there)
            session = RunSession(settings, Processes())
            session.keep("prompt", {"index": len(session.records)})
        result = {"methods": [], "notes": notes}
        session.conclude(result)
        said = [f"Measured in several starts that differ in {name} (here, then there)"]
        assert [note.split(":")[0] for note in notes] == ([] if name in ("busy_cores", "date") else said)
        assert result["environment"] == here | {"busy_cores_at_end": 0.0} and len(result["prompts"]) == 2


def test_what_an_earlier_version_began_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "busy_cores", lambda: 0.0)
    here = dict.fromkeys(("cpu", "instructions", "gpus", "packages", "torch_threads", "commit"), "here")
    earlier = {name: value for name, value in here.items() if name != "instructions"}
    for described in (earlier, here):
        monkeypatch.setattr(environment, "describe", lambda described=described: described)
        session = RunSession(Settings(output_dir=tmp_path), Processes())
        session.keep("prompt", {"index": len(session.records)})
    result = {"methods": [], "notes": []}
    session.conclude(result)
    (note,) = result["notes"]
    assert "differ in instructions (None, then here)" in note


def test_any_process_continues_what_others_began(tmp_path: Path) -> None:
    journals = [opened(tmp_path) for _ in range(3)]
    for journal, number in zip(journals[:2], (0, 1), strict=True):
        journal.append({"number": number})
    assert numbers(opened(tmp_path)) == [0, 1]
    for journal in journals:
        journal.close()
    discard(tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


def test_each_record_is_written_through(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for number in range(2):
        journal.append({"number": number})
        assert numbers(opened(tmp_path)) == list(range(number + 1))
    assert journal._file is not None
    ((synchronous,),) = journal._file.execute("PRAGMA synchronous")
    assert synchronous >= 2, "FULL: a record is on the disk before work goes on"


def test_other_arguments_are_refused_by_name(tmp_path: Path) -> None:
    opened(tmp_path).append({"number": 0})
    with pytest.raises(BenchError, match="max_new_tokens=8, which is now 9; give the same arguments"):
        opened(tmp_path, ARGUMENTS | {"max_new_tokens": 9})


def test_a_damaged_or_unreadable_journal_is_named(tmp_path: Path) -> None:
    path = opened(tmp_path).path
    path.write_text("not a database, though long enough to be taken for one\n" * 100)
    with pytest.raises(BenchError, match=r"run\.journal\.sqlite' is damaged \(.*\); delete that file"):
        opened(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(BenchError, match=r"run\.journal\.sqlite' can't be read or written \(.*\); .* make it writable"):
        opened(tmp_path)


def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.append({"number": 0})
    assert journal._file is not None
    # Not a page more.
    journal._file.execute("PRAGMA max_page_count = 1")
    with pytest.raises(BenchError, match=r"disk is full\); what was measured before is kept"):
        journal.append({"number": 1, "long": "x" * 100_000})
    assert numbers(journal) == numbers(opened(tmp_path)) == [0]


# Each draws its tokens, and is long enough to be killed several times.
LINES = {
    "subtasks": "--task subtasks --limit 1 --repeats 1",
    "benchmark": "--task benchmark --prompt_lengths 20 30 --repeats 2",
    "decode": "--task decode --repeats 3",
}


def arguments(task: str, pair: tuple[Path, Path], folder: Path) -> list[str]:
    models = ["--model_name", str(pair[0]), "--assistant_model", str(pair[1]), "--device", "cpu"]
    return [
        *LINES[task].split(), *models, "--assisted_generation", "--do_sample", "--max_new_tokens", "8",
        "--output_dir", str(folder),
    ]  # fmt: skip


def run(task: str, pair: tuple[Path, Path], folder: Path) -> dict[str, Any]:
    """Runs a task to its end, in this process; returns the result."""
    assert load_script().main(arguments(task, pair, folder)) == 0
    (path,) = folder.glob(f"*{results.SUFFIX}")
    return results.load(path)


def kill_after(calls: int, delay: float, task: str, pair: tuple[Path, Path], folder: Path) -> bool:
    """Start a task as a user does, and kill it `delay` seconds after its bar has shown that it made so many calls.

    Returns:
        Whether it was killed before its end.
    """
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments(task, pair, folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # The progress bar shows every call.
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_MININTERVAL": "0"},
    )
    assert process.stderr is not None
    said = b""
    # Not the bar of the weights that are loaded. It starts from the calls of earlier processes.
    shown = re.compile(rf"{task}:[^\r\n]*?(\d+)/\d+ \[".encode())
    try:
        while calls >= 0 and (not (done := [int(n) for n in shown.findall(said)]) or done[-1] - done[0] < calls):
            more = os.read(process.stderr.fileno(), 4096)
            if not more:
                break
            said += more
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=delay)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert process.returncode in (0, -signal.SIGKILL), said.decode()
    return process.returncode != 0


def kept(folder: Path) -> list[dict[str, Any]]:
    """The records in a run's journal."""
    for path in folder.glob("*.journal.sqlite"):
        connection = sqlite3.connect(path, timeout=60)
        try:
            rows = connection.execute("SELECT record FROM records ORDER BY number").fetchall()
        except sqlite3.OperationalError:
            return []  # its tables are being made
        finally:
            connection.close()
        return [json.loads(record) for (record,) in rows]
    return []


def key(call: Call) -> tuple[Any, ...]:
    return call.method, call.prompts, call.repeat


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same in every run."""
    calls = {key(call): (call.position, call.tokens, call.texts, call.rounds) for call in result["calls"]}
    same = ("prompts", "quality", "methods", "notes")
    return {name: result[name] for name in same} | {"calls": calls, "passes": shape(result["passes"])}


def shape(value: Any) -> Any:
    """The same data with times replaced by how many there are."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return len(value) if all(isinstance(item, float) for item in value) else [shape(item) for item in value]
    return "time" if isinstance(value, float) else value


@pytest.mark.parametrize("task", ["benchmark", "decode"])
def test_killed_at_any_point_it_ends_with_the_same_table(
    saved_pair: tuple[Path, Path], tmp_path: Path, task: str
) -> None:
    broken = tmp_path / "broken"
    expected = run(task, saved_pair, tmp_path / "whole")
    seed = 14
    print("seed", seed)
    rng = random.Random(seed)
    broken.mkdir()
    # In the first half, so that a process that this one looks at late is not done yet.
    calls = rng.randrange(2, len(expected["calls"]) // 2)
    assert kill_after(calls, rng.random() * 0.01, task, saved_pair, broken), "ended before it was killed"
    assert len(kept(broken)) >= calls
    finish_and_compare(task, saved_pair, broken, expected)


def finish_and_compare(task: str, pair: tuple[Path, Path], broken: Path, expected: dict[str, Any]) -> None:
    """Finish a run in this process: what was measured before is in the result, as it was."""
    before = kept(broken)
    result = run(task, pair, broken)
    assert without_times(result) == without_times(expected)
    # Times of what was measured before the kills are the ones in the result, so nothing was measured twice.
    seconds = {key(call): call.seconds for call in result["calls"]}
    calls = [record for record in before if record["kind"] == "call"]
    assert all(seconds[r["method"], tuple(r["prompts"]), r["repeat"]] == r["seconds"] for r in calls)
    assert not list(broken.glob("*.journal.*"))


@pytest.mark.timeout(0)
def test_kills_at_random_moments_lose_nothing_and_double_nothing(saved_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """`HF_SPECDEC_KILLS=100` tries a hundred, from the start of the process to the writing of its result."""
    expected = run("subtasks", saved_pair, tmp_path / "whole")
    most, ended, folder = len(expected["calls"]), 0, tmp_path / "broken"
    for seed in range(KILLS):
        rng = random.Random(seed)
        calls, delay = rng.choice([-1, 0, 1, 3, 10, most]), rng.random() * rng.choice([0.01, 0.3, 3])
        folder.mkdir(exist_ok=True)
        before = kept(folder)
        killed = kill_after(calls, delay, "subtasks", saved_pair, folder)
        after = kept(folder)
        print(f"seed {seed}: {len(before)} records, killed {delay:.2f} s after {calls} calls with {len(after)}")
        assert len({key_of(record) for record in after}) == len(after), "doubled"
        if killed and (after or not before):
            assert after[: len(before)] == before, "lost"
            continue
        # It came to its end, or was killed once it had taken its journal away.
        ended += 1
        (path,) = folder.glob(f"*{results.SUFFIX}")
        assert without_times(results.load(path)) == without_times(expected)
        shutil.rmtree(folder)
    print(f"{KILLS} starts, {ended} of them came to their end")
    folder.mkdir(exist_ok=True)
    finish_and_compare("subtasks", saved_pair, folder, expected)


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


def test_a_disk_too_full_for_the_result_loses_nothing(
    saved_pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run("decode", saved_pair, tmp_path)
    (written,) = tmp_path.glob(f"*{results.SUFFIX}")
    earlier = written.read_bytes()
    capsys.readouterr()

    def full(self: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert load_script().main(arguments("decode", saved_pair, tmp_path)) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device); give a folder" in last and written.read_bytes() == earlier
    seconds = sorted(record["seconds"] for record in kept(tmp_path) if record["kind"] == "call")
    assert len(seconds) == 5 * 24, "five methods"
    assert sorted(call.seconds for call in run("decode", saved_pair, tmp_path)["calls"]) == seconds
