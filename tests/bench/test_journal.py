"""The journal, interrupted runs, and finished ones: nothing measured is lost, and the result is the same."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.made_up_results import drafted_call, result_of
from helpers.script import SCRIPT, load_script

from hf_specdec.bench import environment, results
from hf_specdec.bench.journal import Journal, discard, files, key_of
from hf_specdec.bench.models import loading
from hf_specdec.bench.records import Asked, Call, Result
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import run_task

HERE = environment.describe()


@pytest.fixture(autouse=True)
def described_once(monkeypatch) -> None:
    """Asking git and watching the processor takes a moment at each start."""
    monkeypatch.setattr(environment, "describe", lambda: HERE)


def opened(folder: Path, **changes: Any) -> Journal:
    return Journal(Settings(output_dir=folder, max_new_tokens=8, draft_models=("a", "b"), **changes), "run")


def asked(number: int) -> Asked:
    return Asked(number, number, "qa", 9)


def numbers(journal: Journal) -> list[int]:
    return [record.index for record in journal.records.values()]


def test_a_start_that_measured_nothing_binds_nobody(tmp_path) -> None:
    opened(tmp_path)
    assert list(tmp_path.iterdir()) == []
    opened(tmp_path, limit=9).keep("asked", asked(0))


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_records_come_back_and_a_torn_last_line_does_not(tmp_path, cut: int) -> None:
    journal = opened(tmp_path)
    for number in range(3):
        journal.keep("asked", asked(number))
    (path,) = files(tmp_path, "run")
    text = path.read_text()
    path.write_text(text[:-cut])  # killed while it wrote
    again = opened(tmp_path)
    assert numbers(again) == [0, 1]
    again.keep("asked", asked(2))
    assert numbers(opened(tmp_path)) == [0, 1, 2]
    for length in range(len(text.splitlines()[0]) + 1):  # or while it wrote the first line
        path.write_text(text[:length])
        assert numbers(opened(tmp_path)) == [2]


def test_every_record_comes_back_as_it_was(tmp_path) -> None:
    call = drafted_call([(2, 1), (3, 3)], seconds=1.23456789)
    journal = opened(tmp_path)
    kept = journal.keep("call", call)
    assert kept == replace(call, seconds=1.2346) == opened(tmp_path).call("speculative", (0,), 0)
    journal.keep("call", replace(call, seconds=7.0))
    assert opened(tmp_path).call("speculative", (0,), 0) == kept, "one of each; the first stands"


def test_no_two_processes_write_one_file(tmp_path) -> None:
    """And any continues what others began."""
    journals = [opened(tmp_path) for _ in range(3)]
    for journal, number in zip(journals[:2], (0, 1), strict=True):
        journal.keep("asked", asked(number))
    assert len(files(tmp_path, "run")) == 2 and numbers(opened(tmp_path)) == [0, 1]
    for journal in journals:
        journal.close()
    discard(tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


def test_each_record_is_on_the_disk_before_work_goes_on(tmp_path, monkeypatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(number))
    journal = opened(tmp_path)
    for number in range(2):
        journal.keep("asked", asked(number))
        assert numbers(opened(tmp_path)) == list(range(number + 1)) and len(synced) == number + 2


def test_a_start_elsewhere_is_noted(tmp_path, monkeypatch) -> None:
    changes = {"cpu": "other", "instructions": "other", "gpus": ("other",), "packages": {"torch": "0"}}
    changes |= {"torch_threads": 99, "commit": "other", "busy_cores": 9.0, "date": "other"}
    for name, value in changes.items():
        folder, notes = tmp_path / name, []
        folder.mkdir()
        for number, there in enumerate((HERE, replace(HERE, **{name: value}))):
            monkeypatch.setattr(environment, "describe", lambda there=there: there)
            journal = opened(folder)
            notes = journal.notes()
            journal.keep("asked", asked(number))
        said = [note.split(" (")[0] for note in notes]
        assert said == ([] if name in ("busy_cores", "date") else [f"Measured in several starts that differ in {name}"])
        assert journal.began()[0] == HERE


def test_other_arguments_are_refused_by_name(tmp_path) -> None:
    opened(tmp_path).keep("asked", asked(0))
    with pytest.raises(BenchError, match="limit=None, which is now 9; give the same arguments"):
        opened(tmp_path, limit=9)


def test_a_damaged_or_unreadable_journal_is_named(tmp_path) -> None:
    path = tmp_path / "run.journal-0.jsonl"
    path.write_text("no record\n" * 3)
    with pytest.raises(BenchError, match=r"run\.journal-0\.jsonl' is damaged \(.*\); delete that file"):
        opened(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(BenchError, match=r"run\.journal-0\.jsonl' can't be read \(.*\); make it readable"):
        opened(tmp_path)


def test_a_full_disk_keeps_what_was_there(tmp_path, monkeypatch) -> None:
    journal = opened(tmp_path)
    journal.keep("asked", asked(0))

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BenchError, match=r"No space left on device\); what was measured before is kept"):
        journal.keep("asked", asked(1))
    assert numbers(journal) == [0] and numbers(opened(tmp_path))[:1] == [0]


# Each draws its tokens.
LINES = {
    "benchmark": "--task benchmark --prompt_lengths 20 --limit 3 --repeats 2",
    "decode": "--task decode --repeats 1 --prompt one --prompt two",
}


def arguments(task: str, pair: tuple[Path, Path], folder: Path) -> list[str]:
    models = ["--model_name", str(pair[0]), "--assistant_model", str(pair[1]), "--device", "cpu"]
    return [
        *LINES[task].split(), *models, "--assisted_generation", "--do_sample", "--max_new_tokens", "8",
        "--output_dir", str(folder),
    ]  # fmt: skip


def run(task: str, pair: tuple[Path, Path], folder: Path) -> Result:
    """Runs a task to its end, in this process; returns the result."""
    assert load_script().main(arguments(task, pair, folder)) == 0
    (path,) = folder.glob(f"*{results.SUFFIX}")
    return results.load(path)


def kill_after(calls: int, task: str, pair: tuple[Path, Path], folder: Path) -> bool:
    """Start a task as a user does, and kill it once its bar has shown that it made so many calls.

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
    # Not the bar of the weights that are loaded.
    shown = re.compile(rf"{task}:[^\r\n]*?(\d+)/\d+ \[".encode())
    try:
        while max(map(int, shown.findall(said)), default=0) < calls and (
            more := os.read(process.stderr.fileno(), 4096)
        ):
            said += more
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert process.returncode in (0, -signal.SIGKILL), said.decode()
    return process.returncode != 0


def kept(folder: Path) -> list[dict[str, Any]]:
    """The whole records in a run's journal."""
    found = []
    for path in sorted(folder.glob("*.journal-*.jsonl"), key=lambda path: (len(path.name), path.name)):
        found += [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()[1:]]
    return found


def key(call: Call) -> tuple[Any, ...]:
    return call.method, call.prompts, call.repeat


def without_times(result: Result) -> dict[str, Any]:
    """What has to be the same in every run."""
    names = ("outputs", "texts", "rounds", "drafted", "accepted", "reached", "kept", "steps", "widths", "position")
    calls = {key(call): tuple(getattr(call, name) for name in names) for call in result.calls}
    passes = sorted(
        (one.engine, str(one.draft), one.prompts, one.repeat, one.role, one.tokens) for one in result.passes
    )
    same = {name: getattr(result, name) for name in ("prompts", "quality", "methods", "notes")}
    return same | {"calls": calls, "passes": passes}


def test_killed_at_any_point_it_ends_with_the_same_table(saved_pair: tuple[Path, Path], tmp_path) -> None:
    """What was measured before the kill is in the result, as it was, and nothing was measured twice."""
    broken = tmp_path / "broken"
    expected = run("benchmark", saved_pair, tmp_path / "whole")
    broken.mkdir()
    # In the first half, so that a process that this one looks at late is not done yet.
    calls = random.Random(14).randrange(2, len(expected.calls) // 2)
    assert kill_after(calls, "benchmark", saved_pair, broken), "ended before it was killed"
    before = kept(broken)
    assert len(before) >= calls
    assert len({key_of(one["kind"], one["record"]) for one in before}) == len(before), "doubled"
    result = run("benchmark", saved_pair, broken)
    assert without_times(result) == without_times(expected)
    seconds = {key(call): call.seconds for call in result.calls}
    records = [one["record"] for one in before if one["kind"] == "call"]
    assert all(seconds[r["method"], tuple(r["prompts"]), r["repeat"]] == r["seconds"] for r in records)
    assert not list(broken.glob("*.journal-*"))


def interrupt_after(
    records: int, task: str, pair: tuple[Path, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C once the journal has so many records."""
    keep = Journal.keep

    def kept(self: Journal, *record: Any) -> Any:
        found = keep(self, *record)
        if len(self.records) == records:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "keep", kept)
        assert load_script().main(arguments(task, pair, folder)) == 130


def test_what_was_decoded_before_is_shown_again(saved_pair: tuple[Path, Path], tmp_path, capsys, monkeypatch) -> None:
    interrupt_after(4, "decode", saved_pair, tmp_path, monkeypatch)
    assert "the same command continues" in capsys.readouterr().err
    run("decode", saved_pair, tmp_path)
    again = capsys.readouterr().out.split("# Decode")[0]
    run("decode", saved_pair, tmp_path)
    assert capsys.readouterr().out.split("# Decode")[0] == again and again.count("--- ") == 2


def test_a_restart_with_other_arguments_is_refused(saved_pair, tmp_path, capsys, monkeypatch) -> None:
    interrupt_after(3, "benchmark", saved_pair, tmp_path, monkeypatch)
    capsys.readouterr()
    assert load_script().main([*arguments("benchmark", saved_pair, tmp_path), "--seed", "1"]) == 1
    assert "seed=0, which is now 1" in capsys.readouterr().err


def test_a_disk_too_full_for_the_result_loses_nothing(saved_pair, tmp_path, capsys, monkeypatch) -> None:
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
    seconds = sorted(one["record"]["seconds"] for one in kept(tmp_path) if one["kind"] == "call")
    assert len(seconds) == 5 * 2, "five methods"
    assert sorted(call.seconds for call in run("decode", saved_pair, tmp_path).calls) == seconds


def finished(settings: Settings, **changes: Any) -> Path:
    """A result without calls, as a run with these settings leaves it; `changes` are those of its arguments."""
    path = settings.output_dir / f"{results.stem(settings)}{results.SUFFIX}"
    path.write_bytes(results.to_bytes(result_of([], [], settings=replace(settings, **changes))))
    return path


def test_the_same_arguments_may_be_measured_again_and_no_others(tmp_path) -> None:
    settings = Settings(task="engines", output_dir=tmp_path, batch_sizes=(1, 4), grid={"num_assistant_tokens": (2,)})
    path = finished(settings)
    results.check_output(settings)
    others: dict[str, Any] = {
        "max_new_tokens": 31, "engines": ("recorded",), "limit": 3, "batch_sizes": (1,), "repeats": 9,
        "grid": {"num_assistant_tokens": (2, 3)}, "offload_folder": Path("x"),
    }  # fmt: skip
    for name, value in others.items():
        other = replace(settings, **{name: value})
        assert results.stem(other) == results.stem(settings)
        with pytest.raises(BenchError, match=f"{re.escape(path.name)}' holds a finished run with {name}=.* or delete"):
            results.check_output(other)
    # The files of another name, or in another folder, are others.
    results.check_output(replace(settings, do_sample=True, limit=3))
    results.check_output(replace(settings, output_dir=tmp_path / "new", limit=3))


def test_a_file_that_cannot_be_read_is_kept_too(tmp_path) -> None:
    settings = Settings(output_dir=tmp_path)
    path = finished(settings)
    path.write_bytes(b"of another version")
    with pytest.raises(BenchError, match="is not a result of this version"):
        results.check_output(settings)
    assert path.read_bytes() == b"of another version"


@pytest.mark.parametrize(
    "task", ["benchmark", "decode", "subtasks", "sweep", "ablation", "engines", "tune", "align", "replay"]
)
def test_every_task_looks_before_it_loads_models(task: str, tmp_path, monkeypatch) -> None:
    class LoadedError(Exception):
        pass

    def load(*arguments: Any) -> None:
        raise LoadedError

    monkeypatch.setattr(loading, "_load_model", load)
    settings = Settings(task=task, assisted_generation=True, device="cpu", output_dir=tmp_path)
    path = finished(settings)
    with pytest.raises(LoadedError):
        run_task(settings)
    before = path.read_bytes()
    with pytest.raises(BenchError, match="holds a finished run with max_new_tokens=30, which is now 31"):
        run_task(replace(settings, max_new_tokens=31))
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


def test_another_command_keeps_the_files_and_the_same_one_writes_them_again(
    script: ModuleType, saved_pair: tuple[Path, Path], tmp_path, capsys
) -> None:
    line = ["--model_name", str(saved_pair[0]), "--task", "decode", "--prompt", "One", "--output_dir", str(tmp_path)]
    assert script.main([*line, "--max_new_tokens", "6"]) == 0
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert script.main([*line, "--max_new_tokens", "5"]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and "max_new_tokens=6, which is now 5; give another folder" in error
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept
    assert script.main([*line, "--max_new_tokens", "6"]) == 0
    assert set(tmp_path.iterdir()) == set(kept) and "--- 1: " in capsys.readouterr().out
