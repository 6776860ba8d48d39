"""Every task of the script on the embedded pair, as a user starts it, short: its tables exist and hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.script import load_script

from hf_specdec import embedded

LIMIT = 2  # examples of each subtask
SHORT = ["--limit", str(LIMIT), "--max_new_tokens", "5", "--repeats", "1", "--dtype", "float32"]
LINES = {
    "benchmark-speculative-greedy": "--task benchmark --assisted_generation",
    "decode-speculative-sampling": "--task decode --assisted_generation --do_sample",
    "subtasks-greedy": "--task subtasks",
    "sweep-train-greedy": "--task sweep --split train --gamma 3 --fallback_thres 0.6 --rollback_thres 2",
    "ablation-greedy": "--task ablation",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, script = tmp_path_factory.mktemp("embedded"), load_script()
    for line in [*LINES.values(), "--task report"]:
        draft = ["--draft_models", "draft"] if "sweep" in line else []
        assert script.main([*line.split(), *draft, *SHORT, "--output_dir", str(folder)]) == 0, line
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in LINES}


def test_every_task_leaves_its_files_and_no_journal(folder: Path) -> None:
    named = {path.stem for path in folder.glob("*.json")}
    assert named == {path.stem for path in folder.glob("*.md")} == set(LINES)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".md", ".png"}
    for name in set(LINES) - {"decode-speculative-sampling"}:
        assert list(folder.glob(f"{name}-*.png")), name


def test_tables_have_their_rows(folder: Path) -> None:
    tables = {name: (folder / f"{name}.md").read_text() for name in LINES}
    benchmark = tables["benchmark-speculative-greedy"]
    assert benchmark.count("\n| 10 ") == 3 and "**" in benchmark.splitlines()[-1]
    assert tables["decode-speculative-sampling"].count("\n| 8 ") == 1
    for subtask in embedded.SUBTASKS:
        # Speedups, BiLD's verdict and five methods' quality; rows of times only where a second round was needed.
        assert tables["subtasks-greedy"].count(f"\n| {subtask} ") >= 1 + 1 + 5, subtask
    assert "of 8 subtasks" in tables["subtasks-greedy"]
    assert tables["sweep-train-greedy"].count("\n| draft") == 1 + 2 and " of 8 |" in tables["sweep-train-greedy"]
    assert "--task subtasks" in tables["sweep-train-greedy"]
    assert sum(line.startswith(("| yes", "| no")) for line in tables["ablation-greedy"].splitlines()) == 8


def test_each_subtask_has_its_share_of_examples(results: dict[str, dict[str, Any]]) -> None:
    for name in ("subtasks-greedy", "sweep-train-greedy", "ablation-greedy"):
        prompts, runs = results[name]["prompts"], results[name]["runs"]
        dialogues = [prompt["label"] for prompt in prompts if prompt["turn"] == 1]
        assert dialogues == [subtask for subtask in embedded.SUBTASKS for _ in range(LIMIT)]
        assert len(runs) == len(prompts) * len(results[name]["methods"])


def test_lossless_outputs_are_plain_decoding_s(results: dict[str, dict[str, Any]]) -> None:
    """But for near-ties, whose margins in float32 are far below those of the choices that BiLD leaves to the draft."""
    for name in ("subtasks-greedy", "sweep-train-greedy", "ablation-greedy"):
        for prompt in results[name]["prompts"]:
            for method, found in prompt["divergences"].items():
                assert method.startswith("bild") or found["margin"] < 1e-3, (name, prompt["index"], method)


def test_prompts_are_examples_of_the_split_asked_for(results: dict[str, dict[str, Any]]) -> None:
    """No example is in both, as the corpus's own tests show."""
    for name, split in (
        ("subtasks-greedy", "heldout"),
        ("ablation-greedy", "heldout"),
        ("sweep-train-greedy", "train"),
    ):
        examples = [x for subtask in embedded.SUBTASKS for x in embedded.examples(subtask, split, LIMIT)]
        expected = [(x.subtask, turn, [text]) for x in examples for turn, text in enumerate(x.references, start=1)]
        found = [(prompt["label"], prompt["turn"], prompt["references"]) for prompt in results[name]["prompts"]]
        assert found == expected, name


def test_a_draft_is_accepted_and_costs_less_than_its_target(results: dict[str, dict[str, Any]]) -> None:
    runs = [run for run in results["subtasks-greedy"]["runs"] if run["method"] == "speculative"]
    rounds = [item for run in runs for item in run["rounds"]]
    assert 0.3 < sum(item["accepted"] for item in rounds) / sum(item["drafted"] for item in rounds) < 1
    models = results["subtasks-greedy"]["models"]
    assert models["draft"]["parameters"] < models["target"]["parameters"]
