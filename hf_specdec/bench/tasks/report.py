"""The task `report`: every result in a folder rendered again, as markdown and as pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_specdec.bench.reports import rendering
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = Mapping[str, Any]

# What has to be equal for times to be comparable, and what to call it.
_COMPARED = {
    "cpu": "processor",
    "gpus": "GPUs",
    "cores": "cores",
    "torch_threads": "threads",
    "packages": "package versions",
    "commit": "commit",
}


def run_report(settings: Settings) -> None:
    """Renders `*.json` of `settings.output_dir` to `.md` and `.png` beside it, and prints what was written.

    Raises `BenchError` where there is nothing to render, or a file can't be read, rendered or written.
    """
    # Here because it imports matplotlib, which takes a second.
    from hf_specdec.bench.reports.pictures.by_task import pictures

    folder = settings.output_dir
    paths = sorted(folder.glob(f"*{results.SUFFIX}"))
    if not paths:
        raise BenchError(f"--output_dir: {str(folder)!r} holds no JSON of an earlier task; give a folder that does")
    loaded = {path: results.load(path) for path in paths}
    for path, result in loaded.items():
        stem = folder / path.name.removesuffix(results.SUFFIX)
        try:
            text, figures = rendering.render(result), pictures(result)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise BenchError(
                f"--output_dir: {str(path)!r} is no result of this version ({error!r}); move it away"
            ) from error
        results.write_bytes(stem.with_name(f"{stem.name}.md"), text.encode())
        print(stem.with_name(f"{stem.name}.md"))
        for name, figure in figures.items():
            _write_picture(stem.with_name(f"{stem.name}-{name}.png"), figure)
            print(stem.with_name(f"{stem.name}-{name}.png"))
    for line in differences(list(loaded.items())):
        print(line, file=sys.stderr)


def differences(loaded: Sequence[tuple[Path, Result]]) -> list[str]:
    """A warning for each thing in which results differ so that their times should not be compared."""
    lines = []
    for key, name in _COMPARED.items():
        groups: dict[str, list[str]] = {}
        for path, result in loaded:
            groups.setdefault(json.dumps(result["environment"].get(key), sort_keys=True), []).append(path.name)
        if len(groups) > 1:
            sides = "; ".join(f"{', '.join(names)}: {value}" for value, names in groups.items())
            lines.append(f"warning: these results differ in {name}, so don't compare their times ({sides})")
    return lines


def _write_picture(path: Path, figure: Figure) -> None:
    try:
        # Without the version of the library, so that a picture changes only with what it shows.
        figure.savefig(path, metadata={"Software": None})
    except OSError as error:
        raise BenchError(f"--output_dir: {str(path)!r} can't be written ({error.strerror}); make room") from error
