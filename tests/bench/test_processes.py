"""Several processes (torchrun) measure together what one measures alone."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_pair import save_pair

from hf_specdec.bench.journal import Journal
from hf_specdec.bench.results import load
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import run_task, task_module

ROOT = Path(__file__).resolve().parents[2]


def outcome(path: Path) -> dict[str, Any]:
    """What may not depend on who measured it: tokens, acceptance and prompts."""
    result = load(path)
    calls = {
        (call.repeat, call.prompts, call.method): (call.outputs, call.texts, call.accepted, call.drafted)
        for call in result.calls
    }
    return {"calls": calls} | {key: getattr(result, key) for key in ("prompts", "quality", "methods")}


@pytest.fixture
def asked(tmp_path) -> Path:
    """Three questions and their answers."""
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(f'{{"q": "How much is {n} and 2?", "a": "{n + 2}"}}\n' for n in range(3)))
    return path


def test_two_processes_give_what_one_does(tmp_path, asked: Path) -> None:
    target, draft = save_pair(tmp_path)
    settings = Settings(
        task="subtasks", model_name=str(target), assistant_model=str(draft), assisted_generation=True, repeats=1,
        dataset=str(asked), prompt_column="q", reference_column="a", max_new_tokens=6, do_sample=True, seed=3,
        output_dir=tmp_path / "one",
    )  # fmt: skip
    run_task(settings)
    line = ["scripts/assisted_generation.py", "--task", "subtasks", "--model_name", str(target), "--device", "cpu"]
    line += ["--assistant_model", str(draft), "--max_new_tokens", "6", "--do_sample", "--seed", "3"]
    line += ["--dataset", str(asked), "--prompt_column", "q", "--reference_column", "a"]
    line += ["--repeats", "1", "--output_dir", str(tmp_path / "two")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *line],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Overall Result: AS: ") == 6, "only one process speaks"
    stem = "subtasks-target-draft-asked.jsonl-sampling"
    name, table = f"{stem}.json.gz", f"{stem}.md"
    assert outcome(tmp_path / "two" / name) == outcome(tmp_path / "one" / name)
    assert load(tmp_path / "two" / name).processes == 2
    assert "in each of 2 parallel processes" in (tmp_path / "two" / table).read_text()
    assert "in each of" not in (tmp_path / "one" / table).read_text()
    assert {path.suffix for path in (tmp_path / "two").iterdir()} == {".gz", ".md", ".png"}, "no journal"


@pytest.mark.parametrize("finishes", [1, 2])
def test_a_run_finished_by_another_number_of_processes_says_so(
    saved_pair: tuple[Path, Path], tmp_path, asked: Path, monkeypatch, finishes: int
) -> None:
    target, draft = saved_pair
    settings = Settings(
        task="subtasks", model_name=str(target), assistant_model=str(draft), assisted_generation=True, repeats=1,
        dataset=str(asked), prompt_column="q", reference_column="a", max_new_tokens=3, output_dir=tmp_path,
    )  # fmt: skip
    keep, task, folder = Journal.keep, task_module("subtasks"), tmp_path

    def kept(self: Journal, *record: Any) -> Any:
        found = keep(self, *record)
        if len(self.records) == 3:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "keep", kept)
        task.run(settings, Processes(0, 2))
    task.run(settings, Processes(0, finishes))
    (path,) = folder.glob("*.json.gz")
    said = [note for note in load(path).notes if "Begun with 2 parallel processes and finished with 1" in note]
    assert len(said) == (finishes != 2)


def test_shares_are_disjoint_and_complete() -> None:
    shares = [Processes(rank, 3).share(range(10)) for rank in range(3)]
    assert sorted(number for share in shares for number in share) == list(range(10))
    assert Processes().share("ab") == ["a", "b"] and Processes().gather([1]) == [1]


def test_tasks_that_time_one_process_alone_say_so(monkeypatch) -> None:
    monkeypatch.setattr("hf_specdec.bench.running.processes.processes", lambda cpu: Processes(1, 2))
    with pytest.raises(BenchError, match="--task: 'benchmark' runs in one process only, but 2 were started"):
        run_task(Settings())
