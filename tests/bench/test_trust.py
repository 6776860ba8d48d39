"""Hostile input: weights, code beside them, names in data. The script writes to its own folder only."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.script import SCRIPT, load_script
from safetensors.torch import load_file

from hf_specdec.bench.results import load, stem
from hf_specdec.bench.settings import Settings

# A folder above, a shell, a markdown table and a formula of matplotlib, each of which a name could break out into.
HOSTILE = "../../x; rm -rf $(id) | `id`\n$\\frac$ <b>"


def line(pair: tuple[Path, Path], folder: Path, *rest: str) -> list[str]:
    models = ["--model_name", str(pair[0]), "--assistant_model", str(pair[1]), "--assisted_generation"]
    return [*models, "--device", "cpu", "--max_new_tokens", "4", "--repeats", "1", "--output_dir", str(folder), *rest]


@pytest.fixture
def pickled(saved_pair: tuple[Path, Path], tmp_path) -> Path:
    """A target whose weights are only there as pytorch_model.bin."""
    folder = tmp_path / "pickled"
    shutil.copytree(saved_pair[0], folder)
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    return folder


@pytest.mark.parametrize("place", ["--model_name", "--assistant_model"])
def test_pickled_weights_are_read_on_request_only(saved_pair, pickled, tmp_path, place: str, capsys) -> None:
    pair = (pickled, saved_pair[1]) if place == "--model_name" else (saved_pair[0], pickled)
    call = line(pair, tmp_path / "out", "--task", "decode", "--prompt", "one")
    assert load_script().main(call) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{place}: '{pickled}' has no readable safetensors weights" in said and "--allow_pickle" in said
    assert load_script().main([*call, "--allow_pickle"]) == 0


@pytest.mark.parametrize("auto", ["AutoConfig", "AutoTokenizer"])
def test_code_beside_a_model_never_runs(saved_pair, tmp_path, auto: str, capsys, monkeypatch) -> None:
    """Nor is the user asked whether it may: a yes typed too soon would run it."""
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    folder, trace = tmp_path / "model", tmp_path / "it ran"
    shutil.copytree(saved_pair[0], folder)
    (folder / "code.py").write_text(f"open({str(trace)!r}, 'w')\n")
    name = "tokenizer_config.json" if auto == "AutoTokenizer" else "config.json"
    config = json.loads((folder / name).read_text())
    config["auto_map"] = {auto: ["code.X", None] if auto == "AutoTokenizer" else "code.X"}
    if auto == "AutoTokenizer":
        config["tokenizer_class"] = "X"
    else:
        config["model_type"] = "x"
    (folder / name).write_text(json.dumps(config))
    assert load_script().main(line((folder, saved_pair[1]), tmp_path / "out", "--task", "decode", "--prompt", "a")) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert str(folder) in said and not trace.exists()


def test_names_in_data_stay_names(saved_pair: tuple[Path, Path], tmp_path) -> None:
    questions, out = tmp_path / "question.jsonl", tmp_path / "a" / "b" / "out"
    lines = [{"category": HOSTILE, "turns": [f"How much is {n} and 2?"], "reference": [f"{n + 2}"]} for n in range(2)]
    questions.write_text("".join(json.dumps(one) + "\n" for one in lines))
    data = ["--task", "subtasks", "--dataset", "spec_bench", "--dataset_path", str(questions)]
    assert load_script().main(line(saved_pair, out, *data)) == 0
    assert load_script().main(["--task", "report", "--output_dir", str(out)]) == 0
    stem = "subtasks-target-draft-spec_bench-greedy"
    assert all(path.name.startswith(stem) for path in out.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "question.jsonl"]
    name = " ".join(HOSTILE.split())
    assert {prompt.label for prompt in load(out / f"{stem}.json.gz").prompts} == {name}
    rows = [row for row in (out / f"{stem}.md").read_text().splitlines() if "rm -rf" in row]
    assert rows and all(name.replace("|", "\\|") in row for row in rows if row.startswith("|"))


def test_data_set_and_model_names_give_file_names_inside_the_folder() -> None:
    settings = Settings(task="subtasks", model_name="/a/x; rm $(id)", dataset="/b/..; `id`.jsonl")
    assert stem(settings) == "subtasks-x_rm_id_-.._id_.jsonl-greedy"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_run_writes_to_its_folder_only(saved_pair: tuple[Path, Path], tmp_path) -> None:
    """Home, working directory and temporary files are new folders; models can't be written to."""
    places: dict[str, Any] = {name: tmp_path / name for name in ("HOME", "TMPDIR", "MPLCONFIGDIR", "cwd")}
    for place in places.values():
        place.mkdir()
    before = files(saved_pair[0].parent)
    environment = os.environ | {name: str(place) for name, place in places.items() if name != "cwd"}
    for name in ("HF_HOME", "XDG_CACHE_HOME", "HF_METRICS_CACHE"):
        environment.pop(name, None)
    out = tmp_path / "out"
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            *line(saved_pair, out, "--task", "subtasks", "--dataset", "embedded:qa", "--limit", "1"),
        ],
        cwd=places["cwd"],
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(files(out)) > 3 and files(saved_pair[0].parent) == before
    # torch makes the folder of its compiler's cache when it is imported.
    left = {name: {file for file in files(place) if "torchinductor" not in file} for name, place in places.items()}
    assert left == {"HOME": set(), "TMPDIR": set(), "cwd": set(), "MPLCONFIGDIR": left["MPLCONFIGDIR"]}
