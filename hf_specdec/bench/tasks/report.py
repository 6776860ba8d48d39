"""The task `report`: results rendered again, those of several pairs joined, and the READMEs that quote them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports import readme, rendering
from hf_specdec.bench.reports.tables import pairs
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results

# What has to be equal for times to be comparable, and what to call it.
_COMPARED = {
    "cpu": "processor",
    "instructions": "instructions of the processor",
    "gpus": "GPUs",
    "cores": "cores",
    "torch_threads": "threads",
    "packages": "package versions",
    "commit": "commit",
}


def run_report(settings: Settings) -> None:
    """Renders all results under `settings.output_dir` to markdown and pictures beside them; prints what was written.

    Results of `subtasks` are also joined into `pairs.md`. A README.md in the folder or above it gets the parts that
    it takes from results.

    Raises:
        BenchError: there is nothing to render, or a file can't be read, rendered or written. The other results are
            rendered nevertheless.
    """
    folder = settings.output_dir
    paths = sorted(folder.rglob(f"*{results.SUFFIX}"))
    if not paths:
        raise BenchError(f"--output_dir: {str(folder)!r} holds no JSON of an earlier task; give a folder that does")
    loaded: dict[Path, Result] = {}
    failed: list[BenchError] = []
    for path in paths:
        stem = path.with_name(path.name.removesuffix(results.SUFFIX))
        try:
            result = results.load(path)
            _render(stem, result)
        except BenchError as error:
            failed.append(error)
        else:
            loaded[stem] = result
    _join(folder, [result for result in loaded.values() if result["task"] == "subtasks"])
    for path in (folder / "README.md", folder.resolve().parent / "README.md"):
        try:
            _fill(path, loaded)
        except BenchError as error:
            failed.append(error)
    for line in differences([(stem, result) for stem, result in loaded.items()]):
        print(line, file=sys.stderr)
    for earlier in failed[:-1]:
        print(f"error: {earlier}", file=sys.stderr)
    if failed:
        raise failed[-1]


def differences(loaded: Sequence[tuple[Path, Result]]) -> list[str]:
    """A warning for each difference that makes times of results incomparable."""
    lines = []
    for key, name in _COMPARED.items():
        groups: dict[str, list[str]] = {}
        for path, result in loaded:
            groups.setdefault(json.dumps(result["environment"].get(key), sort_keys=True), []).append(path.name)
        if len(groups) > 1:
            sides = "; ".join(f"{', '.join(names)}: {value}" for value, names in groups.items())
            lines.append(f"warning: these results differ in {name}, so don't compare their times ({sides})")
    return lines


def _render(stem: Path, result: Result) -> None:
    # Here because it imports matplotlib, which takes a second.
    from hf_specdec.bench.reports.pictures.by_task import pictures
    from hf_specdec.bench.reports.pictures.drawing import png

    try:
        text = rendering.render(result)
        drawn = {f"{stem.name}-{name}.png": png(figure) for name, figure in pictures(result).items()}
    except (KeyError, TypeError, IndexError, ValueError) as error:
        name = f"{stem}{results.SUFFIX}"
        raise BenchError(f"--output_dir: {name!r} is no result of this version ({error!r}); move it away") from error
    _write(stem.with_name(f"{stem.name}.md"), text.encode())
    for name, data in drawn.items():
        _write(stem.with_name(name), data)


def _join(folder: Path, listed: Sequence[Result]) -> None:
    """The results of `subtasks` in one table and picture, where there are several."""
    if len(listed) < 2:
        return
    from hf_specdec.bench.reports.pictures.drawing import png
    from hf_specdec.bench.reports.pictures.pairs import greedy_and_sampling

    _write(folder / "pairs.md", pairs.render(listed).encode())
    _write(folder / "pairs-greedy-and-sampling.png", png(greedy_and_sampling(listed)))


def _fill(path: Path, loaded: Mapping[Path, Result]) -> None:
    """A README's parts, where it has any."""
    if not path.is_file() or not readme.has_parts(before := path.read_text(encoding="utf-8")):
        return
    resolved = {stem.resolve(): result for stem, result in loaded.items()}
    try:
        text = readme.filled(before, path.resolve().parent, resolved)
    except (KeyError, ValueError) as error:
        raise BenchError(
            f"--output_dir: {str(path)!r} asks for a result that is not under {path.parent} ({error}); correct the "
            "path between its markers"
        ) from error
    _write(path, text.encode())


def _write(path: Path, data: bytes) -> None:
    results.write_bytes(path, data)
    print(path)
