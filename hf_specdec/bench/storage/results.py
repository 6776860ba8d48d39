"""The result of a run: the dict that becomes JSON, and the files it is kept in."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.methods import Method, lookahead
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import environment

FORMAT = 1
_LISTS = ("runs", "prompts", "forwards", "quality")


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
        "methods": [{"name": method.name, "title": method.title, **method.facts} for method in methods],
        "prompts": [{"index": p.index, "label": p.label, "tokens": len(p.token_ids)} for p in prompts],
        "notes": [] if pair.synthetic is None else [f"{pair.synthetic}. Timings are real, texts mean nothing."],
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


def stem(settings: Settings) -> str:
    """What the files of a run are called: `<task>-<method, or data set and split where given>-<greedy|sampling>`."""
    parts = [settings.task]
    if settings.task in ("benchmark", "decode"):
        parts.append(settings.generation_strategy if settings.assisted_generation else "plain")
    elif settings.dataset != "embedded":
        parts.append(re.sub(r"[^A-Za-z0-9._]+", "_", Path(settings.dataset).name))
    if settings.split is not None:
        parts.append(re.sub(r"[^A-Za-z0-9._]+", "_", settings.split))
    return "-".join([*parts, "sampling" if settings.sampling else "greedy"])


def from_records(records: Sequence[dict[str, Any]], methods: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parts of a result that come from a journal, in an order that doesn't depend on who measured when."""
    order = {method["name"]: number for number, method in enumerate(methods)}
    kinds: dict[str, list[dict[str, Any]]] = {"run": [], "prompt": [], "forwards": []}
    for record in records:
        kinds[record["kind"]].append({key: value for key, value in record.items() if key != "kind"})
    return {
        "prompts": sorted(kinds["prompt"], key=lambda prompt: prompt["index"]),
        "runs": sorted(kinds["run"], key=lambda run: (run["repeat"], run["prompt"], order[run["method"]])),
        "forwards": sorted(kinds["forwards"], key=lambda item: (item["draft"], item["repeat"], item["prompt"])),
    }


def save(result: dict[str, Any], settings: Settings) -> tuple[Path, Path]:
    """Writes `<stem>.json` and its rendering `.md`; returns both paths."""
    name = stem(settings)
    data, rendered = settings.output_dir / f"{name}.json", settings.output_dir / f"{name}.md"
    write_text(data, to_json(result))
    write_text(rendered, rendering.render(result))
    return data, rendered


def write_text(path: Path, text: str) -> None:
    """All or nothing: a full disk leaves what was there before; raises `BenchError` then."""
    try:
        _write(path, text)
    except OSError as error:
        raise BenchError(
            f"--output_dir: writing to {str(path.parent)!r} failed ({error.strerror}); give a folder "
            "that has room and can be written to"
        ) from error


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def to_json(result: dict[str, Any]) -> str:
    """One line a key and one line a run, so that files stay short and differences readable."""
    lines = [
        f"{json.dumps(key)}: " + (_one_a_line(value) if key in _LISTS else json.dumps(value))
        for key, value in result.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _one_a_line(items: list[Any]) -> str:
    return "[\n" + ",\n".join(json.dumps(item) for item in items) + "\n]"
