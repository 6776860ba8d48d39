"""Renders tables and pictures again from saved results, and updates the READMEs that quote them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from hf_specdec.bench import results
from hf_specdec.bench.records import Result
from hf_specdec.bench.reports import readme
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import task_module


def run(settings: Settings, shared: Processes) -> None:
    """Render each result under `settings.output_dir` next to its JSON; print what was written.

    The parts of README.md files, in the folder or above it, that quote results are updated.

    Raises:
        BenchError: there is nothing to render, or a file cannot be read, rendered or written. The other results are
            rendered all the same.
    """
    folder = settings.output_dir
    paths = sorted(folder.rglob(f"*{results.SUFFIX}"))
    if not paths:
        raise BenchError(f"--output_dir: {str(folder)!r} holds no JSON of an earlier task; give a folder that does")
    loaded: dict[Path, Result] = {}
    failed: list[BenchError] = []
    for path in paths:
        name = path.with_name(path.name.removesuffix(results.SUFFIX))
        try:
            result = results.load(path)
            results.save_report(result, name, task_module(result.settings.task).render)
        except BenchError as error:
            failed.append(error)
        else:
            loaded[name] = result
            print(f"{name}.md")
    for path in (folder / "README.md", folder.resolve().parent / "README.md"):
        try:
            _fill(path, loaded)
        except BenchError as error:
            failed.append(error)
    for earlier in failed[:-1]:
        print(f"error: {earlier}", file=sys.stderr)
    if failed:
        raise failed[-1]


def _fill(path: Path, loaded: Mapping[Path, Result]) -> None:
    """Update the parts of a README that quote results."""
    if not path.is_file() or not readme.has_parts(before := path.read_text(encoding="utf-8")):
        return
    resolved = {name.resolve(): result for name, result in loaded.items()}
    try:
        text = readme.filled(before, path.resolve().parent, resolved)
    except (KeyError, ValueError) as error:
        raise BenchError(
            f"--output_dir: {str(path)!r} asks for a result that is not under {path.parent} ({error}); correct the "
            "path between its markers"
        ) from error
    results.write_bytes(path, text.encode())
    print(path)
