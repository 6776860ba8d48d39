"""What a long run has measured so far: a SQLite file to which every record is written before the next measurement."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_specdec.bench.settings import BenchError

Record = dict[str, Any]

_PATIENCE = 60.0  # seconds that a process waits for another's record to be written
_TABLES = """
CREATE TABLE IF NOT EXISTS header (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS records (number INTEGER PRIMARY KEY, record TEXT NOT NULL);
"""


class Journal:
    """Records of a run in `<stem>.journal.sqlite`; opening it continues what is there.

    All processes of a run write to the same file, and any may continue what another began.

    Args:
        folder: an existing folder.
        stem: names the run inside the folder.
        arguments: JSON-serialisable; a journal begun with others is refused.

    Attributes:
        records: those of earlier starts, and what this process has added.

    Raises:
        BenchError: the journal was begun with other arguments, is damaged, or can't be read or written.
    """

    def __init__(self, folder: Path, stem: str, arguments: Mapping[str, Any]) -> None:
        self.path = path_of(folder, stem)
        # As they come back from disk: tuples as lists.
        self._header: Record = {"arguments": json.loads(json.dumps(arguments))}
        self._file: sqlite3.Connection | None = None
        self.records: list[Record] = []
        if self.path.exists():
            with self._said():
                self._file = self._open()
                before = {name: json.loads(value) for name, value in self._file.execute("SELECT * FROM header")}
                rows = self._file.execute("SELECT record FROM records ORDER BY number").fetchall()
                self.records = [json.loads(record) for (record,) in rows]
            if self.records:
                self._check(before["arguments"])
                self._header |= before

    def begin(self, **header: Any) -> None:
        """From here on `append` may be called; `header` is kept if no earlier start left one."""
        self._header = {**header, **self._header}

    @property
    def header(self) -> Record:
        """The arguments, and what `begin` was given by the start that measured first."""
        return self._header

    def append(self, record: Record) -> None:
        """Writes a record through to the disk; what was written before survives whatever happens here.

        The file is made with the first record, so that a start that measured nothing binds no later one to its
        arguments.
        """
        with self._said():
            if self._file is None:
                self._file = self._open()
            with self._file:
                kept = [(name, json.dumps(value)) for name, value in self._header.items()]
                self._file.executemany("INSERT OR IGNORE INTO header VALUES (?, ?)", kept)
                self._file.execute("INSERT INTO records (record) VALUES (?)", (json.dumps(record),))
        self.records.append(record)

    def close(self) -> None:
        """Closes the file; what it holds stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_PATIENCE)
        connection.executescript(_TABLES)
        return connection

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise BenchError(
                f"--output_dir: {str(self.path)!r} can't be read or written ({error}); what was measured before is "
                "kept: make room or make it writable, and start again with the same arguments"
            ) from error
        except (sqlite3.DatabaseError, ValueError) as error:
            raise BenchError(
                f"--output_dir: {str(self.path)!r} is damaged ({error}); delete that file to measure anew"
            ) from error

    def _check(self, before: Mapping[str, Any]) -> None:
        now = self._header["arguments"]
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise BenchError(
                    f"--output_dir: {str(self.path)!r} holds an unfinished run with {name}={before.get(name)!r}, which "
                    f"is now {now.get(name)!r}; give the same arguments to continue it, another folder, or delete "
                    "that file"
                )


def path_of(folder: Path, stem: str) -> Path:
    """The file of a run's journal."""
    return folder / f"{stem}.journal.sqlite"


def discard(folder: Path, stem: str) -> None:
    """Deletes a run's journal, once its result has been saved."""
    path_of(folder, stem).unlink(missing_ok=True)
