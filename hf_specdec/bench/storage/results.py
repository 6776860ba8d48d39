"""The result of a run: a dict whose calls are columns on disk, and the files it is kept in."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.known_pairs import default_draft, full_name, short_name
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.running.methods import Method, lookahead
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import environment
from hf_specdec.bench.storage.columns import pack, rounded, unpack

FORMAT = 2
SUFFIX = ".json.gz"


def new(settings: Settings, pair: LoadedPair, methods: Sequence[Method], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """A result without calls.

    Keys: `arguments` (of `Settings`), `methods` (`Method.describe`), `prompts`, `calls` (`Call`s), `passes` (times of
    bare passes), `cold` (`ColdStart`s as dicts), `readings` (how fast memory was read, by call), `loading_seconds` by
    model, `notes` for the reader.
    """
    return {
        "format": FORMAT,
        "task": settings.task,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "arguments": settings.to_dict(),
        "environment": environment.describe(),
        "models": pair.describe(),
        "loading_seconds": rounded(dict(pair.loading_seconds)),
        "sampling": settings.sampling,
        "lookahead": lookahead(settings, pair),
        "methods": [method.describe() for method in methods],
        "prompts": [
            {
                "index": p.index,
                "question": p.index if p.question is None else p.question,
                "label": p.label,
                "tokens": len(p.token_ids),
            }
            for p in prompts
        ],
        "notes": [] if pair.synthetic is None else [f"{pair.synthetic}. Timings are real, texts mean nothing."],
        "calls": [],
        "passes": [],
        "cold": [],
        "readings": [],
        "quality": [],
    }


def check_output(settings: Settings) -> None:
    """Makes the output folder; raises `BenchError` if it can't be written to, or a finished result would be lost.

    A result of the same name may be measured again with the same arguments only. Those that just one of the versions
    has are not compared.
    """
    folder = settings.output_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BenchError(
            f"--output_dir: {str(folder)!r} can't be written to ({error.strerror}); give a folder that can"
        ) from error
    path = folder / f"{stem(settings)}{SUFFIX}"
    before = load(path)["arguments"] if path.exists() else {}
    # As they come back from disk: tuples as lists.
    for name, value in json.loads(json.dumps(settings.to_dict())).items():
        if name != "output_dir" and before.get(name, value) != value:
            raise BenchError(
                f"--output_dir: {str(path)!r} holds a finished run with {name}={before[name]!r}, which is now "
                f"{value!r}; give another folder to keep both, or delete that file"
            )


def stem(settings: Settings) -> str:
    """The name of a run's files, without suffix.

    `<task>-<target>[-<draft>][-<precision>][-draft_<precision>]-<strategy, or data set and split>-<greedy|sampling>`,
    so that several pairs, precisions and data sets live in one folder. A sweep's drafts are named where they were
    chosen, the draft's precision where it is not the target's.
    """
    parts = [settings.task, full_name(settings.model_name)]
    drafts = settings.draft_models or ((settings.assistant_model,) if settings.assistant_model else ())
    if not drafts and settings.task not in ("sweep", "tune") and (known := default_draft(settings.model_name)):
        drafts = (known,)
    if settings.assisted_generation:
        parts += [full_name(name) for name in drafts]
    parts += [kind for kind in (settings.precision, settings.dtype) if kind not in (None, "auto", "float32")]
    if settings.assisted_generation:
        kinds = (settings.draft_precision, settings.draft_dtype)
        parts += [f"draft_{kind}" for kind in kinds if kind not in (None, "auto", settings.dtype)]
    if settings.task in ("benchmark", "decode"):
        parts += [f"head_of_{settings.draft_vocabulary}"] if settings.draft_vocabulary else []
        parts.append(settings.generation_strategy if settings.assisted_generation else "plain")
    elif settings.task != "engines":
        parts.append(settings.dataset)
    if settings.split is not None:
        parts.append(settings.split)
    parts.append("sampling" if settings.sampling else "greedy")
    return "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", short_name(part)) for part in parts)


def save(result: Mapping[str, Any], settings: Settings) -> tuple[Path, Path]:
    """Writes `<stem>.json.gz` and its rendering `.md`; returns both paths."""
    name = stem(settings)
    data, rendered = settings.output_dir / f"{name}{SUFFIX}", settings.output_dir / f"{name}.md"
    write_bytes(data, to_bytes(result))
    # What is read back, so that a report made later is the same.
    write_bytes(rendered, rendering.render(from_bytes(to_bytes(result))).encode())
    return data, rendered


def save_pictures(result: Mapping[str, Any], settings: Settings) -> None:
    """Writes the result's pictures, `<stem>-<what it shows>.png`."""
    # Here because it imports matplotlib, which takes a second.
    from hf_specdec.bench.reports.pictures.by_task import pictures
    from hf_specdec.bench.reports.pictures.drawing import png

    for name, figure in pictures(result).items():
        write_bytes(settings.output_dir / f"{stem(settings)}-{name}.png", png(figure))


def to_bytes(result: Mapping[str, Any]) -> bytes:
    """Compressed JSON; the same result gives the same bytes."""
    packed = {**result, **pack(result["calls"])}
    return gzip.compress(json.dumps(packed, ensure_ascii=False).encode(), mtime=0)


def from_bytes(data: bytes) -> dict[str, Any]:
    """The result that `to_bytes` was given.

    Raises:
        ValueError, KeyError, TypeError, OSError: it is none.
    """
    packed = json.loads(gzip.decompress(data))
    if packed["format"] != FORMAT:
        raise ValueError(f"format {packed['format']!r}")
    calls = unpack(packed)
    return {key: value for key, value in packed.items() if key not in ("answers", "rounds")} | {"calls": calls}


def load(path: Path) -> dict[str, Any]:
    """A result from its file.

    Raises:
        BenchError: the file can't be read, or is no result of this version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(f"--output_dir: {str(path)!r} can't be read ({error.strerror}); make it readable") from error
    try:
        return from_bytes(data)
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise BenchError(
            f"--output_dir: {str(path)!r} is damaged or no result of this version ({error}); move it away, or "
            "delete it and measure again"
        ) from error


def write_bytes(path: Path, data: bytes) -> None:
    """All or nothing: a full disk leaves what was there before; raises `BenchError` then."""
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
