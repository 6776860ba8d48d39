"""A finished result is overwritten by a repetition of its command alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.made_up_results import result_of

from hf_specdec.bench import results
from hf_specdec.bench.models import loading
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import run_task


def finished(settings: Settings, **changes: Any) -> Path:
    """A result without calls, as a run with these settings leaves it; `changes` are those of its arguments."""
    path = settings.output_dir / f"{results.stem(settings)}{results.SUFFIX}"
    path.write_bytes(results.to_bytes(result_of([], [], settings=replace(settings, **changes))))
    return path


def test_the_same_arguments_may_be_measured_again_and_no_others(tmp_path: Path) -> None:
    settings = Settings(task="engines", output_dir=tmp_path, batch_sizes=(1, 4), grid={"num_assistant_tokens": (2,)})
    path = finished(settings)
    results.check_output(settings)
    others: dict[str, Any] = {
        "max_new_tokens": 31, "engines": ("recorded",), "limit": 3, "batch_sizes": (1,), "repeats": 9,
        "grid": {"num_assistant_tokens": (2, 3)}, "offload_folder": Path("x"),
    }  # fmt: skip
    for name, value in others.items():
        other = replace(settings, **{name: value})
        assert results.stem(other) == results.stem(settings)
        with pytest.raises(BenchError, match=f"{re.escape(path.name)}' holds a finished run with {name}=.* or delete"):
            results.check_output(other)
    # The files of another name, or in another folder, are others.
    results.check_output(replace(settings, do_sample=True, limit=3))
    results.check_output(replace(settings, output_dir=tmp_path / "new", limit=3))


def test_a_file_that_cannot_be_read_is_kept_too(tmp_path: Path) -> None:
    settings = Settings(output_dir=tmp_path)
    path = finished(settings)
    path.write_bytes(b"of another version")
    with pytest.raises(BenchError, match="is not a result of this version"):
        results.check_output(settings)
    assert path.read_bytes() == b"of another version"


@pytest.mark.parametrize(
    "task",
    ["benchmark", "decode", "subtasks", "sweep", "ablation", "engines", "tune", "align", "replay"],
)
def test_every_task_looks_before_it_loads_models(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LoadedError(Exception):
        pass

    def load(*arguments: Any) -> None:
        raise LoadedError

    monkeypatch.setattr(loading, "_load_model", load)
    settings = Settings(task=task, assisted_generation=True, device="cpu", output_dir=tmp_path)
    path = finished(settings)
    with pytest.raises(LoadedError):
        run_task(settings)
    before = path.read_bytes()
    with pytest.raises(BenchError, match="holds a finished run with max_new_tokens=30, which is now 31"):
        run_task(replace(settings, max_new_tokens=31))
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


def test_another_command_keeps_the_files_and_the_same_one_writes_them_again(
    script: ModuleType, saved_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--model_name", str(saved_pair[0]), "--task", "decode", "--prompt", "One", "--output_dir", str(tmp_path)]
    assert script.main([*line, "--max_new_tokens", "6"]) == 0
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert script.main([*line, "--max_new_tokens", "5"]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and "max_new_tokens=6, which is now 5; give another folder" in error
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept
    assert script.main([*line, "--max_new_tokens", "6"]) == 0
    assert set(tmp_path.iterdir()) == set(kept) and "--- 1: " in capsys.readouterr().out
