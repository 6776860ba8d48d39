"""What a long run has measured so far, on disk: one JSON line a record, each written through before work goes on."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hf_specdec.bench.settings import BenchError

Record = dict[str, Any]


class Journal:
    """Records of one process, appended to `<stem>.journal.<rank>.jsonl`; opening it continues what is there.

    The first line is the header, the arguments that all records were measured with. `records` are those of all
    processes' journals of this stem, from earlier starts: any process may continue what another began, so that a
    restart need not have as many processes.

    Args:
        folder: an existing folder.
        stem: names the run inside the folder.
        arguments: JSON-serialisable; a journal begun with others is refused.
        rank: number of this process, from 0.

    Raises:
        BenchError: the journal was begun with other arguments, is damaged before its last line, or can't be read
            or written.
    """

    def __init__(self, folder: Path, stem: str, arguments: Mapping[str, Any], rank: int = 0) -> None:
        self.stem, self.folder = stem, folder
        self.path = folder / f"{stem}.journal.{rank}.jsonl"
        # As they come back from disk: tuples as lists.
        self._arguments = json.loads(json.dumps(arguments))
        self._file: BinaryIO | None = None
        self.header: Record | None = None
        self.records: list[Record] = []
        for path in parts(folder, stem):
            self._read(path)

    @property
    def resumed(self) -> bool:
        """Whether an earlier start left records."""
        return bool(self.records)

    def begin(self, **header: Any) -> None:
        """From here on `append` may be called; `header` is kept with the arguments if no earlier start left one.

        With several processes, all have to have opened their journals before one begins to write.
        """
        if self.header is None:
            self.header = {"kind": "header", "arguments": self._arguments, **header}

    def append(self, record: Record) -> None:
        """Writes a record through to the disk; what was written before survives whatever happens here.

        The file is made with the first record, so that a start that measured nothing binds no later one to its
        arguments.
        """
        if self._file is None:
            self._open()
        self._write(record)
        self.records.append(record)

    def close(self) -> None:
        """Closes the file; what it holds stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        assert self.header is not None, "begin() comes first"
        try:
            whole = _cut_torn_line(self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`, after the last record
        except OSError as error:
            raise self._unwritable(error) from error
        if not whole:
            self._write(self.header)

    def _write(self, record: Record) -> None:
        assert self._file is not None
        line = json.dumps(record).encode() + b"\n"
        try:
            # Unbuffered, and a full disk may take a part of the line: the rest is then a torn line.
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise BenchError(
                f"--output_dir: {str(path)!r} can't be read ({error.strerror}); make it readable, or give "
                "another folder"
            ) from error
        # What follows the last newline was cut off by the end of an earlier process.
        for number, line in enumerate(lines[:-1], start=1):
            try:
                record = json.loads(line)
                kind = record["kind"]
            except (ValueError, KeyError, TypeError) as error:
                raise BenchError(
                    f"--output_dir: line {number} of {str(path)!r} is damaged; delete that file to measure anew"
                ) from error
            if kind == "header":
                self._check(record, path)
                self.header = self.header or record
            else:
                self.records.append(record)

    def _check(self, header: Record, path: Path) -> None:
        before = header.get("arguments", {})
        for name in sorted({*before, *self._arguments}):
            if before.get(name) != self._arguments.get(name):
                raise BenchError(
                    f"--output_dir: {str(path)!r} holds an unfinished run with {name}={before.get(name)!r}, which is "
                    f"now {self._arguments.get(name)!r}; give the same arguments to continue it, another folder, or "
                    "delete that file"
                )

    def _unwritable(self, error: OSError) -> BenchError:
        return BenchError(
            f"--output_dir: writing to {str(self.path)!r} failed ({error.strerror}); what was measured before is kept: "
            "make room and start again with the same arguments"
        )


def parts(folder: Path, stem: str) -> Sequence[Path]:
    """The journals of all processes of a run."""
    return sorted(path for path in folder.glob("*.journal.*.jsonl") if path.name.startswith(f"{stem}.journal."))


def discard(folder: Path, stem: str) -> None:
    """Deletes the journals of all processes of a run, once everything stands in its result."""
    for path in parts(folder, stem):
        path.unlink(missing_ok=True)


def _cut_torn_line(path: Path) -> bool:
    """Cuts what follows the last newline; returns whether whole lines are left."""
    if not path.exists():
        return False
    with open(path, "r+b") as file:
        end = file.read().rfind(b"\n") + 1
        file.truncate(end)
    return end > 0
