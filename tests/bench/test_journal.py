"""The journal, and runs that are broken off: nothing measured is lost, and the end is the same."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_pair import save_pair

from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage.journal import Journal, discard, parts
from hf_specdec.bench.storage.results import stem
from hf_specdec.bench.tasks.benchmark import run_benchmark
from hf_specdec.bench.tasks.decode import run_decode
from hf_specdec.bench.tasks.subtasks import run_subtasks

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
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = Settings(**vars(settings) | {"task": "decode", "output_dir": tmp_path, "prompts": ("One", "Two")})
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


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("journal")
    target, draft = save_pair(folder)
    return Settings(
        task="subtasks", model_name=str(target), assistant_model=str(draft), assisted_generation=True, limit=1,
        max_new_tokens=8, repeats=2, do_sample=True, output_dir=folder / "whole",
    )  # fmt: skip


RUNS: dict[str, Callable[[Settings], None]] = {
    "subtasks": lambda settings: run_subtasks(settings, Processes()),
    "benchmark": run_benchmark,
    "decode": run_decode,
}
KILLED = ("subtasks", "benchmark", "decode")


def asked(settings: Settings, task: str, folder: Path) -> Settings:
    """Short enough for a test, long enough to be killed three times."""
    more = {"benchmark": {"prompt_lengths": (20, 30)}, "decode": {"repeats": 4}}.get(task, {})
    return Settings(**vars(settings) | {"task": task, "output_dir": folder} | more)


def without_times(settings: Settings) -> dict[str, Any]:
    """What has to be the same in every run."""
    result = json.loads((settings.output_dir / f"{stem(settings)}.json").read_text())
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


def start_and_kill(settings: Settings, records: int, delay: float) -> bool:
    """Kills a run some time after its journal has so many lines; returns whether it was still running."""
    process = multiprocessing.get_context("fork").Process(target=RUNS[settings.task], args=(settings,))
    process.start()
    while process.is_alive() and count_lines(settings) < records:
        process.join(0.001)
    process.join(delay)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


def count_lines(settings: Settings) -> int:
    return sum(path.read_bytes().count(b"\n") for path in parts(settings.output_dir, stem(settings)))


@pytest.mark.parametrize("task", KILLED)
def test_killed_at_random_points_it_ends_with_the_same_table(
    settings: Settings, tmp_path: Path, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_settings, broken = (asked(settings, task, tmp_path / name) for name in ("whole", "broken"))
    RUNS[task](whole_settings)
    whole = without_times(whole_settings)
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    broken.output_dir.mkdir()
    kept = []
    for records in sorted(rng.sample(range(2, len(whole["runs"]) - 5), 3)):
        assert start_and_kill(broken, records, rng.random() * 0.01)
        kept.append(count_lines(broken))
    assert kept == sorted(kept) and kept[0] >= 2
    before = Journal(broken.output_dir, stem(broken), kept_arguments(broken)).records
    RUNS[task](broken)
    assert without_times(broken) == whole
    # Times of what was measured before the kills are the ones in the result, so nothing was measured twice.
    result = json.loads((broken.output_dir / f"{stem(broken)}.json").read_text())
    seconds = {(r["repeat"], r["prompt"], r["method"]): r["seconds"] for r in result["runs"]}
    runs = [record for record in before if record["kind"] == "run"]
    assert runs and all(seconds[r["repeat"], r["prompt"], r["method"]] == r["seconds"] for r in runs)
    assert parts(broken.output_dir, stem(broken)) == []


def kept_arguments(settings: Settings) -> dict[str, Any]:
    return {key: value for key, value in settings.to_dict().items() if key != "output_dir"}


def test_what_was_decoded_before_is_shown_again(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = asked(settings, "decode", tmp_path)
    assert start_and_kill(broken, 4, 0.0)
    capsys.readouterr()
    run_decode(broken)
    again = capsys.readouterr().out.split("# Decode")[0]
    run_decode(broken)
    assert capsys.readouterr().out.split("# Decode")[0] == again and again.count("--- ") == 8


def test_a_restart_with_other_arguments_is_refused(settings: Settings, tmp_path: Path) -> None:
    broken = asked(settings, "subtasks", tmp_path)
    assert start_and_kill(broken, 3, 0.0)
    with pytest.raises(BenchError, match="seed=0, which is now 1"):
        run_subtasks(Settings(**vars(broken) | {"seed": 1}), Processes())
