"""The records of a run so far: each is a line of JSON, written to disk before the next measurement."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from hf_specdec.bench import environment
from hf_specdec.bench.records import Asked, Call, ColdStart, Environment, as_json, from_json
from hf_specdec.bench.settings import BenchError, Settings

Key = tuple[Any, ...]

# The fields that identify a record of each kind.
_KEYS = {
    "call": ("method", "prompts", "repeat"),
    "asked": ("index",),
    "passes": ("engine", "draft", "prompts", "repeat"),
    "cold": ("method", "batch", "length"),
}
_TYPES = {"call": Call, "asked": Asked, "cold": ColdStart}
# The parts of the environment that decide whether times can be compared.
_COMPARED = ("cpu", "instructions", "gpus", "cores", "torch_threads", "packages", "commit")


def key_of(kind: str, record: Mapping[str, Any]) -> Key:
    """The key that identifies a record."""
    values = (record[name] for name in _KEYS[kind])
    return (kind, *(tuple(value) if isinstance(value, list) else value for value in values))


class Journal:
    """The records of a run, in `<stem>.journal-<number>.jsonl`, a file for each process of each start.

    Opening it reads the files of earlier starts with the same arguments; its own file is created with the first record,
    so that a start that measured nothing does not bind later ones to its arguments. A torn last line, left by a killed
    process, is skipped, and its call is measured again.

    Args:
        settings: the run's settings, whose output folder exists; a journal begun with others is refused.
        stem: the name of the run inside the folder.
        processes: number of measuring processes.

    Raises:
        BenchError: the journal was begun with other arguments, is damaged, or can't be read or written.
    """

    def __init__(self, settings: Settings, stem: str, processes: int = 1) -> None:
        self.folder, self.stem = settings.output_dir, stem
        self.environment = environment.describe()
        self._header = {
            "arguments": as_json(settings),
            "processes": processes,
            "environment": as_json(self.environment),
        }
        # The run may have been moved from another folder.
        del self._header["arguments"]["output_dir"]
        self._file: IO[str] | None = None
        self._begun: list[dict[str, Any]] = []
        self.records: dict[Key, Any] = {}
        for path in files(self.folder, stem):
            if whole := _lines(path):
                self._check(path, whole[0])
                self._begun.append(whole[0])
                for line in whole[1:]:
                    kind, record = line["kind"], line["record"]
                    self.records.setdefault(key_of(kind, record), _read(kind, record))

    def keep(self, kind: str, record: Any) -> Any:
        """Write a record to disk unless there is one with the same key; return the stored one."""
        told = as_json(record)
        key = key_of(kind, told)
        if key not in self.records:
            try:
                if self._file is None:
                    self._file = _new_file(self.folder, self.stem)
                    self._write(self._header)
                self._write({"kind": kind, "record": told})
            except OSError as error:
                raise BenchError(
                    f"--output_dir: {str(self.folder)!r} can't be written to ({error.strerror}); what was measured "
                    "before is kept: make room or make it writable, and start again with the same arguments"
                ) from error
            self.records[key] = _read(kind, told)
        return self.records[key]

    def call(self, method: str, prompts: tuple[int, ...], repeat: int) -> Call | None:
        """The measured call, or None."""
        found: Call | None = self.records.get(("call", method, prompts, repeat))
        return found

    def has(self, kind: str, *about: Any) -> bool:
        """Whether a record exists."""
        return (kind, *about) in self.records

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def began(self) -> tuple[Environment, int]:
        """The environment and the number of processes of the first start."""
        first = self._begun[0] if self._begun else self._header
        return from_json(Environment, first["environment"]), int(first["processes"])

    def notes(self) -> list[str]:
        """Notes on starts in different environments, whose times can't be compared."""
        (before, processes), now = self.began(), self.environment
        found = []
        for name in _COMPARED:
            earlier, later = as_json(getattr(before, name)), as_json(getattr(now, name))
            if earlier != later:
                found.append(
                    f"Measured in several starts that differ in {name} ({earlier}, then {later}): "
                    "times can't be compared safely."
                )
        if processes != self._header["processes"]:
            found.append(
                f"Begun with {processes} parallel processes and finished with {self._header['processes']}: each had "
                "another share of the processor, so times can't be compared safely."
            )
        return found

    def _write(self, line: Any) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _check(self, path: Path, header: Mapping[str, Any]) -> None:
        before, now = header["arguments"], self._header["arguments"]
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise BenchError(
                    f"--output_dir: {str(path)!r} holds an unfinished run with {name}={before.get(name)!r}, which "
                    f"is now {now.get(name)!r}; give the same arguments to continue it, another folder, or delete "
                    "that file"
                )


def files(folder: Path, stem: str) -> list[Path]:
    """The files of a run's journal, in the order of their creation."""
    start = f"{stem}.journal-"
    found = [path for path in folder.iterdir() if path.name.startswith(start) and path.suffix == ".jsonl"]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def discard(folder: Path, stem: str) -> None:
    """Delete a run's journal, once its result has been saved."""
    for path in files(folder, stem):
        path.unlink(missing_ok=True)


def _read(kind: str, record: Mapping[str, Any]) -> Any:
    return record["times"] if kind == "passes" else from_json(_TYPES[kind], record)


def _new_file(folder: Path, stem: str) -> IO[str]:
    """Create a file that no other process writes to."""
    number = 0
    while True:
        try:
            return (folder / f"{stem}.journal-{number}.jsonl").open("x", encoding="utf-8")
        except FileExistsError:
            number += 1


def _lines(path: Path) -> list[dict[str, Any]]:
    """The records on the complete lines of a file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        whole, _, _ = text.rpartition("\n")
        found = [json.loads(line) for line in whole.splitlines()]
        if any("arguments" not in one for one in found[:1]) or any("record" not in one for one in found[1:]):
            raise ValueError("a line is not a record")
        return found
    except OSError as error:
        raise BenchError(
            f"--output_dir: {str(path)!r} can't be read ({error.strerror}); make it readable, or delete it to "
            "measure again"
        ) from error
    except (ValueError, TypeError) as error:
        raise BenchError(
            f"--output_dir: {str(path)!r} is damaged ({error}); delete that file to measure again"
        ) from error
