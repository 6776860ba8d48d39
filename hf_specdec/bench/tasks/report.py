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
    folder = settings.output_dir
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise BenchError(f"--output_dir: {str(folder)!r} holds no JSON of an earlier task; give a folder that does")
    loaded = {path: _load(path) for path in paths}
    for path, result in loaded.items():
        try:
            text, figures = rendering.render(result), pictures(result)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise BenchError(
                f"--output_dir: {str(path)!r} is no result of this version ({error!r}); move it away"
            ) from error
        results.write_text(path.with_suffix(".md"), text)
        print(path.with_suffix(".md"))
        for name, figure in figures.items():
            _write_picture(path.with_name(f"{path.stem}-{name}.png"), figure)
            print(path.with_name(f"{path.stem}-{name}.png"))
    for line in differences(list(loaded.items())):
        print(line, file=sys.stderr)


def pictures(result: Result) -> dict[str, Figure]:
    """The pictures of a result by what they show; none of what it does not hold."""
    # Here because it takes a second.
    from hf_specdec.bench.reports import engine_plots, plots, sweep_report

    task = result["task"]
    found: dict[str, Figure] = {}
    if task == "benchmark" and len(result["methods"]) > 1:
        found["speed-by-length"] = plots.speed_by_length(result)
    if task == "subtasks":
        found["speedup-by-subtask"] = plots.speedup_by_subtask(result)
    if task == "engines":
        found["speed-by-method"] = engine_plots.speed_by_method(result)
        if len({run["batch"] for run in result["runs"]}) > 1:
            found["speed-by-batch"] = engine_plots.speed_by_batch(result)
    if task == "ablation":
        found["speed"] = plots.ablation_bars(result)
    if task == "sweep":
        if len({method["lookahead"] for method in sweep_report.methods_of(result, "speculative")}) > 1:
            found["speedup-over-lookahead"] = plots.speedup_over_lookahead(result)
        for draft, lookahead in dict.fromkeys(
            (m["draft"], m["lookahead"]) for m in sweep_report.methods_of(result, "bild")
        ):
            name = f"thresholds-{draft.rstrip('/').rsplit('/', 1)[-1]}-{lookahead}"
            found[name] = plots.threshold_maps(result, draft, lookahead)
    lossy = any(method.get("strategy", method["name"]) == "bild" for method in result["methods"])
    if task in ("sweep", "subtasks") and result["quality"] and lossy:
        found["speed-against-quality"] = plots.speed_against_quality(result)
    if task in ("benchmark", "subtasks"):
        runs = [run for run in result["runs"] if run["rounds"]]
        if any(item["seconds"] is not None for run in runs for item in run["rounds"][1:]):
            found["time-per-round"] = plots.time_per_round(result)
        if any(item["drafted"] for run in runs for item in run["rounds"]):
            found["acceptance-by-position"] = plots.acceptance_by_position(result)
    if rendering.synthetic_pair(result):
        for figure in found.values():
            figure.axes[0].set_title("Synthetic pair (random weights)\n" + figure.axes[0].get_title())
    return found


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


def _load(path: Path) -> Result:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        known = result["format"] == results.FORMAT and result["task"] in rendering.TASKS
    except OSError as error:
        raise BenchError(f"--output_dir: {str(path)!r} can't be read ({error.strerror}); make it readable") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"--output_dir: {str(path)!r} is damaged or no result of this script; move it away") from error
    if not known:
        raise BenchError(
            f"--output_dir: {str(path)!r} is a result of another version; measure it again, or move it away"
        )
    return result


def _write_picture(path: Path, figure: Figure) -> None:
    try:
        # Without the version of the library, so that a picture changes only with what it shows.
        figure.savefig(path, metadata={"Software": None})
    except OSError as error:
        raise BenchError(f"--output_dir: {str(path)!r} can't be written ({error.strerror}); make room") from error
