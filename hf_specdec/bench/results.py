"""The result of a run: the dict that becomes JSON, and the files it is kept in."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_specdec.bench import environment, report
from hf_specdec.bench.data import Prompt
from hf_specdec.bench.loading import LoadedPair
from hf_specdec.bench.methods import Method, lookahead
from hf_specdec.bench.settings import BenchError, Settings

FORMAT = 1


def new(settings: Settings, pair: LoadedPair, methods: Sequence[Method], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """A result without runs; `report` documents by use what each key is for."""
    return {
        "format": FORMAT,
        "task": settings.task,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "arguments": settings.to_dict(),
        "environment": environment.describe(),
        "models": pair.describe(),
        "sampling": settings.sampling,
        "lookahead": lookahead(settings, pair),
        "methods": [{"name": method.name, "title": method.title} for method in methods],
        "prompts": [{"index": p.index, "label": p.label, "tokens": len(p.token_ids)} for p in prompts],
        "notes": [],
        "runs": [],
        "raw_forwards": {},
    }


def check_writable(folder: Path) -> None:
    """Makes the folder; raises `BenchError` if that or writing there fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BenchError(
            f"--output_dir: {str(folder)!r} can't be written to ({error.strerror}); give a folder that can"
        ) from error


def save(result: dict[str, Any], settings: Settings) -> tuple[Path, Path]:
    """Writes `<task>-<method>-<greedy|sampling>.json` and its rendering `.md`; returns both paths."""
    what = settings.generation_strategy if settings.assisted_generation else "plain"
    stem = f"{settings.task}-{what}-{'sampling' if settings.sampling else 'greedy'}"
    data, rendered = settings.output_dir / f"{stem}.json", settings.output_dir / f"{stem}.md"
    try:
        _write(data, to_json(result))
        _write(rendered, report.render(result))
    except OSError as error:
        raise BenchError(
            f"--output_dir: writing to {str(settings.output_dir)!r} failed ({error.strerror}); give a folder "
            "that has room and can be written to"
        ) from error
    return data, rendered


def _write(path: Path, text: str) -> None:
    """All or nothing: a full disk leaves what was there before."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def to_json(result: dict[str, Any]) -> str:
    """One line a key and one line a run, so that files stay short and differences readable."""
    lines = [
        f"{json.dumps(key)}: " + (_one_a_line(value) if key in ("runs", "prompts") else json.dumps(value))
        for key, value in result.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _one_a_line(items: list[Any]) -> str:
    return "[\n" + ",\n".join(json.dumps(item) for item in items) + "\n]"
