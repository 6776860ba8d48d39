"""Finished results on disk: `<stem>.json.gz` with all measurements, and the report `<stem>.md` with its pictures."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from dataclasses import fields
from pathlib import Path

from hf_specdec.bench.journal import discard
from hf_specdec.bench.models.names import stem
from hf_specdec.bench.records import Result, as_json, from_json
from hf_specdec.bench.reports.document import Render, document
from hf_specdec.bench.settings import BenchError, Settings

FORMAT = 3
SUFFIX = ".json.gz"
# Numerous records are stored as columns.
_COLUMNS = ("calls", "replayed", "passes", "prompts")


def check_output(settings: Settings) -> None:
    """Make the output folder; raise `BenchError` if it is not writable, or a finished result would be lost.

    A result of the same name may only be measured again with the same arguments. Arguments that only one of the
    versions knows are not compared.
    """
    folder = settings.output_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BenchError(
            f"--output_dir: {str(folder)!r} can't be written to ({error.strerror}); give a folder that is writable"
        ) from error
    path = folder / f"{stem(settings)}{SUFFIX}"
    before = as_json(load(path).settings) if path.exists() else {}
    for name, value in as_json(settings).items():
        if name != "output_dir" and before.get(name, value) != value:
            raise BenchError(
                f"--output_dir: {str(path)!r} holds a finished run with {name}={before[name]!r}, which is now "
                f"{value!r}; give another folder to keep both, or delete that file"
            )


def finish(result: Result, render: Render) -> str:
    """Save the result and its report, and delete the journal; return the report's text.

    Args:
        render: composes the task's report.
    """
    settings = result.settings
    name, data = stem(settings), to_bytes(result)
    write_bytes(settings.output_dir / f"{name}{SUFFIX}", data)
    # Rendered from the data as read back, so that a later report is the same.
    text = save_report(from_bytes(data), settings.output_dir / name, render)
    discard(settings.output_dir, name)
    return text


def save_report(result: Result, path: Path, render: Render) -> str:
    """Write `<path>.md` and the pictures that it embeds; return its text.

    Args:
        path: without suffix.
    """
    text, pictures = document(result, path.name, render)
    for name, data in pictures.items():
        write_bytes(path.with_name(name), data)
    write_bytes(path.with_name(f"{path.name}.md"), text.encode())
    return text


def to_bytes(result: Result) -> bytes:
    """Convert to compressed JSON, deterministically. Texts of equal outputs are stored once, tokens never."""
    told = {one.name: as_json(getattr(result, one.name)) for one in fields(result)}
    for name in _COLUMNS:
        rows = told[name]
        told[name] = {column: [row[column] for row in rows] for column in rows[0]} if rows else {}
    for name in ("calls", "replayed"):
        told[name].pop("tokens", None)
    texts = zip(told["calls"].get("outputs", ()), told["calls"].pop("texts", ()), strict=True)
    told["texts"] = {digest: text for outputs, row in texts for digest, text in zip(outputs, row or (), strict=False)}
    told["format"] = FORMAT
    return gzip.compress(json.dumps(told, ensure_ascii=False).encode(), mtime=0)


def from_bytes(data: bytes) -> Result:
    """Restore the result from the bytes of `to_bytes`, with rounded times.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, OSError, EOFError: the data are not a result.
    """
    told = json.loads(gzip.decompress(data))
    if told.pop("format") != FORMAT:
        raise ValueError("it has another format")
    texts = told.pop("texts")
    for name in _COLUMNS:
        columns = told.get(name, {})
        told[name] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for call in told["calls"]:
        call["texts"] = [texts[digest] for digest in call["outputs"]] if set(call["outputs"]) <= texts.keys() else None
    result: Result = from_json(Result, told)
    return result


def load(path: Path) -> Result:
    """Load a result from its file.

    Raises:
        BenchError: the file can't be read, or is not a result of this version.
    """
    try:
        return from_bytes(path.read_bytes())
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BenchError(
            f"--output_dir: {str(path)!r} can't be read, is damaged, or is not a result of this version ({why}); move "
            "it away, or delete it and measure again"
        ) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file atomically; raise `BenchError`, leaving the old file, if the disk is full or not writable."""
    partial = path.with_name(path.name + ".partial")
    try:
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise BenchError(
            f"--output_dir: writing to {str(path.parent)!r} failed ({error.strerror}); give a folder "
            "that has room and can be written to"
        ) from error
