"""Each task has arguments of its own, its help shows them and nothing else, and what has no effect is refused."""

import re
import subprocess
import sys
from types import ModuleType

import pytest
from helpers.script import SCRIPT

from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import TASKS, run_task
from hf_specdec.config import FIELDS

OTHERS = {"output_dir", "task", "help"}


def taken(task: str) -> set[str]:
    return {action.dest for action in TASKS[task].parser()._actions} - OTHERS


def accepted(script: ModuleType, line: str) -> bool:
    try:
        script.settings_of(line.split())
    except SystemExit:
        return False
    return True


def test_every_task_takes_what_it_uses() -> None:
    found = {task: taken(task) for task in TASKS}
    assert found["report"] == set()
    only = {
        "prompts": {"decode", "benchmark", "engines"},
        "answer_column": {"replay"},
        "check": {"replay"},
        "pass_times": {"replay"},
        "minutes": {"draft", "tune"},
        "max_quality_loss": {"tune"},
        "draft_vocabulary": {"benchmark", "draft"},
        "own_prompts": {"draft"},
        "layers": {"draft"},
    }
    only |= {name: {"align"} for name in ("steps", "lora_rank", "on_policy")}
    only |= {name: {"align", "draft"} for name in ("loss", "learning_rate", "top_k_targets")}
    only |= {"draft_models": {"sweep", "tune"}, "engines": {"engines", "replay", "tune"}}
    only |= {"prompt_lengths": {"benchmark", "engines"}, "reference_column": {"subtasks", "sweep", "tune"}}
    only |= {name: {*TASKS} - {"decode", "report"} for name in ("dataset", "split")}
    for name, tasks in only.items():
        assert {task for task in TASKS if name in found[task]} == tasks, name
    assert all({"model_name", "device", "max_new_tokens"} <= found[task] for task in TASKS if task != "report")
    assert "repeats" not in found["tune"] and "better_transformer" not in found["ablation"]


@pytest.mark.parametrize("task", TASKS)
def test_help_shows_what_a_task_takes_with_its_defaults(task: str) -> None:
    text = TASKS[task].parser().format_help()
    shown = set(re.findall(r"--(\w+)", text.partition("options:")[2]))
    assert {name for name in shown if name in FIELDS} == taken(task) & set(FIELDS)
    repeats = f"({TASKS[task].defaults.repeats})"
    assert ("repeats" in taken(task)) == ("--repeats" in text) and ("--repeats" not in text or repeats in text)


@pytest.mark.parametrize("line", [
    "--do_sample --top_k 3 --temperature 0.5 --seed 3", "--temperature 0", "--task align --seed 3",
    "--model_name synthetic:tiny-llama --seed 3", "--task engines --gamma auto",
    "--task subtasks --fallback_thres 0.1 --rollback_thres 1", "--task sweep --lenience 0.1 0.2 --fallback_thres 0.1",
])  # fmt: skip
def test_what_has_an_effect_is_not(script: ModuleType, line: str) -> None:
    assert accepted(script, line)


def test_what_needs_a_draft_is_told_once_for_each_argument(script: ModuleType, capsys) -> None:
    line = "--gamma 3 --draft_dtype float64 --generation_strategy bild --rollback_thres 1 --dtype float64"
    assert accepted(script, line)
    said = re.findall(r"(--\w+) is not used without --assisted_generation\n", capsys.readouterr().err)
    assert said == ["--gamma", "--draft_dtype", "--generation_strategy", "--rollback_thres"]
    for more in ("--assisted_generation", "--task ablation"):
        assert accepted(script, f"{line} {more}") and capsys.readouterr().err == ""


@pytest.mark.parametrize(("given", "words"), [
    ({"task": "subtasks", "prompt_template": "a {prompt}"}, "--prompt_template: 'a {prompt}' does not apply to"),
    ({"model_name": "synthetic:tiny-llama", "offload_folder": "x"}, "--offload_folder: 'x' is not possible with"),
])  # fmt: skip
def test_what_the_data_or_models_rule_out(given: dict, words: str, tmp_path) -> None:
    with pytest.raises(BenchError, match=re.escape(words)):
        run_task(Settings(**given, output_dir=tmp_path))


def test_help_imports_nothing_heavy() -> None:
    """In a process of its own, since this one has everything."""
    words = [sys.executable, "-X", "importtime", str(SCRIPT), "--task", "engines", "--help"]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in told.splitlines()}
    assert "argparse" in imported and not imported & {"torch", "transformers", "pandas", "numpy", "scipy", "datasets"}
