"""The task `report`: markdown and pictures from JSON alone, warnings, and files that can't be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_pair import save_pair

from hf_specdec.bench.figures import speed
from hf_specdec.bench.reports.pictures import benchmark, rounds, sweep, tradeoff
from hf_specdec.bench.reports.pictures.by_task import pictures
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import report
from hf_specdec.bench.tasks.ablation import run_ablation
from hf_specdec.bench.tasks.benchmark import run_benchmark
from hf_specdec.bench.tasks.subtasks import run_subtasks
from hf_specdec.bench.tasks.sweep import run_sweep


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All four tasks on a tiny pair and two short questions, and their report."""
    folder = tmp_path_factory.mktemp("pictures")
    target, draft = save_pair(folder)
    questions = folder / "two.jsonl"
    questions.write_text('{"q": "How much is 2 and 2?", "a": "4"}\n{"q": "How much is 2 and 3?", "a": "5"}\n')
    common: dict[str, Any] = {
        "model_name": str(target), "assistant_model": str(draft), "assisted_generation": True, "max_new_tokens": 8,
        "repeats": 2, "dataset": str(questions), "prompt_column": "q", "reference_column": "a",
        "output_dir": folder / "out",
    }  # fmt: skip
    run_benchmark(Settings(**common, prompt_lengths=(20, 30)))
    run_subtasks(Settings(task="subtasks", **common), Processes())
    grid: dict[str, Any] = {"fallback_thresholds": (0.1, 0.2), "rollback_thresholds": (1.0, 2.0), "lookaheads": (2, 3)}
    run_sweep(Settings(task="sweep", **common, **grid), Processes())
    run_ablation(Settings(task="ablation", **common), Processes())
    for path in (folder / "out").glob("*.md"):
        path.rename(path.with_suffix(".first"))
    report.run_report(Settings(task="report", output_dir=folder / "out"))
    return folder / "out"


def test_every_picture_is_there(folder: Path) -> None:
    rounds = ["acceptance-by-position", "time-per-round"]
    assert sorted(path.stem for path in folder.glob("*.png")) == sorted(
        ["ablation-two.jsonl-greedy-speed"]
        + [f"benchmark-speculative-greedy-{name}" for name in ("speed-by-length", *rounds)]
        + [f"subtasks-two.jsonl-greedy-{name}" for name in ("speedup-by-subtask", "speed-against-quality", *rounds)]
        + [f"sweep-two.jsonl-greedy-{name}" for name in ("speedup-over-lookahead", "speed-against-quality")]
        + [f"sweep-two.jsonl-greedy-thresholds-draft-{lookahead}" for lookahead in (2, 3)]
    )
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))


def test_markdown_is_what_the_tasks_wrote(folder: Path) -> None:
    for path in folder.glob("*.first"):
        assert path.with_suffix(".md").read_text() == path.read_text()


def test_axes_say_what_they_show(folder: Path) -> None:
    for path in folder.glob("*.json"):
        for figure in pictures(json.loads(path.read_text())).values():
            for axes in figure.axes:
                if axes.get_label() != "<colorbar>":
                    assert axes.get_xlabel() and axes.get_title() and (axes.get_ylabel() or axes.get_yticklabels())


def test_drawn_numbers_are_those_of_the_raw_data(folder: Path) -> None:
    result = json.loads((folder / "benchmark-speculative-greedy.json").read_text())
    heights = [bar.get_height() for bar in benchmark.speed_by_length(result).axes[0].patches]
    for number, method in enumerate(("plain", "speculative", "assisted")):
        for place, prompts in enumerate((range(5), range(5, 10))):
            rate = speed.micro_rate(speed.typical_runs(result["runs"], method, prompts).values())
            assert heights[3 * place + number] == pytest.approx(rate)
    drafted = [item for r in result["runs"] if r["method"] == "speculative" for item in r["rounds"]]
    reached = [item for item in drafted if item["drafted"] > 1 and item["accepted"] >= 1]
    share = sum(item["accepted"] >= 2 for item in reached) / len(reached)
    assert rounds.acceptance_by_position(result).axes[0].lines[0].get_ydata()[1] == pytest.approx(share)


def test_results_of_different_machines_are_warned_about(folder: Path) -> None:
    result = json.loads((folder / "ablation-two.jsonl-greedy.json").read_text())
    other = json.loads(json.dumps(result))
    assert report.differences([(Path("a.json"), result), (Path("b.json"), other)]) == []
    other["environment"]["cpu"] = "another"
    (line,) = report.differences([(Path("a.json"), result), (Path("b.json"), other)])
    assert "differ in processor" in line and "a.json" in line and 'b.json: "another"' in line


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is damaged"), ("[]", "is damaged"), ('{"format": 0, "task": "sweep"}', "another version"),
     ('{"format": 1, "task": "sweep"}', "no result of this version")],
)  # fmt: skip
def test_files_that_are_no_results_are_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BenchError, match=rf"x\.json' .*{words}"):
        report.run_report(Settings(task="report", output_dir=tmp_path))


def test_a_result_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(BenchError, match=r"x\.json' can't be read \(Is a directory\); make it readable"):
        report.run_report(Settings(task="report", output_dir=tmp_path))


def test_a_disk_too_full_for_a_picture_is_said(folder: Path, tmp_path: Path) -> None:
    name = "ablation-two.jsonl-greedy"
    (tmp_path / f"{name}.json").write_text((folder / f"{name}.json").read_text())
    # In its place, since writing there then fails as on a full disk.
    (tmp_path / f"{name}-speed.png").mkdir()
    with pytest.raises(BenchError, match=r"speed\.png' can't be written \(.*\); make room"):
        report.run_report(Settings(task="report", output_dir=tmp_path))
    assert (tmp_path / f"{name}.md").read_text() == (folder / f"{name}.md").read_text(), "the rest is there"


def test_what_hardly_differs_is_not_drawn_as_a_difference(folder: Path) -> None:
    result = json.loads((folder / "sweep-two.jsonl-greedy.json").read_text())
    maps = [axes for axes in sweep.threshold_maps(result, *_first_bild(result)).axes if axes.images]
    for axes, span in zip(maps, (0.1, 2.0), strict=True):
        low, high = axes.images[0].get_clim()
        assert high - low >= span - 1e-9
    low, high = tradeoff.speed_against_quality(result).axes[0].get_xlim()
    assert high - low >= 2.0


def _first_bild(result: dict[str, Any]) -> tuple[str, int]:
    method = next(method for method in result["methods"] if method.get("strategy") == "bild")
    return method["draft"], method["lookahead"]


def test_unknown_speedups_are_not_drawn_as_zero(folder: Path) -> None:
    """Outputs of one token have no rate, so no pair of thresholds has a speedup."""
    result = json.loads((folder / "sweep-two.jsonl-greedy.json").read_text())
    for run in result["runs"]:
        run["tokens"] = run["tokens"][:1]
    draft = next(method["draft"] for method in result["methods"] if method.get("strategy") == "bild")
    figure = sweep.threshold_maps(result, draft, 2)
    assert [text.get_text() for text in figure.axes[0].texts] == ["–"] * 4


def test_a_folder_without_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"--output_dir: .* holds no JSON"):
        report.run_report(Settings(task="report", output_dir=tmp_path))
