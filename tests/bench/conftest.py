"""Results of every task on a tiny pair, measured once a run by the tasks' own code."""

import contextlib
import io
import os
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock
from helpers.script import load_script

from hf_specdec.bench.aligning import clock
from hf_specdec.bench.figures import bootstrap
from hf_specdec.bench.records import Result
from hf_specdec.bench.results import SUFFIX, load
from hf_specdec.bench.running import bare_passes, memory, warming
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.tasks import run_task

# Tests are about what is kept, so that fewer warm-up calls, widths and resamples, and less memory read, do.
warming.MOST_WARM_UPS = 2
bare_passes._WIDTHS = (1, 2)
memory.BUFFER["cpu"] = 2**23
bootstrap.RESAMPLES = 200

SUMS = "".join(
    f'{{"q": "How much is {a} and {b}?", "a": "{a + b}", "kind": "x"}}\n' for a, b in ((2, 2), (2, 3), (4, 5))
)


@pytest.fixture
def a_second_each_look(monkeypatch) -> None:
    """A second passes with every look at the clock that ends training."""
    readings = count()
    monkeypatch.setattr(clock, "monotonic", lambda: next(readings))


@pytest.fixture(scope="session")
def script() -> ModuleType:
    return load_script()


@pytest.fixture(scope="session")
def results_folder(saved_pair: tuple[Path, Path], tmp_path_factory) -> Path:
    """One result of each task, and of `subtasks` one greedy and one sampling; to be changed by no test.

    pytest-xdist's workers share it: the first to need it measures, the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "results"
    with FileLock(shared / "results.lock"):
        if not folder.exists():
            measuring = tmp_path_factory.mktemp("measuring")
            measure_each_task(saved_pair, measuring)
            measuring.rename(folder)
    return folder


def measure_each_task(pair: tuple[Path, Path], folder: Path) -> None:
    questions = folder.with_name("sums.jsonl")
    questions.write_text(SUMS)
    target, draft = pair
    common: dict[str, Any] = {
        "model_name": str(target), "assistant_model": str(draft), "assisted_generation": True, "max_new_tokens": 6,
        "repeats": 2, "output_dir": folder,
    }  # fmt: skip
    data = common | {"dataset": str(questions), "prompt_column": "q", "reference_column": "a", "repeats": 1}
    grid = {"num_assistant_tokens": (1, 2, 3, "auto"), "fallback_threshold": (0.1,), "rollback_threshold": (1.0,)}
    with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        # Any two calls will do: no test looks at how warm they were.
        patch.setattr(warming, "SETTLED", 10.0)
        run_task(Settings(**common, prompt_lengths=(20, 30)))
        run_task(Settings(task="subtasks", **data | {"repeats": 2}))
        run_task(Settings(task="subtasks", **data, do_sample=True))
        run_task(Settings(task="sweep", **data | {"limit": 2}, grid=grid))
        run_task(Settings(task="ablation", **data))
        lookaheads = {"num_assistant_tokens": (2,)}
        sizes: dict[str, Any] = {
            "batch_sizes": (1, 2, 3), "prompt_lengths": (20,), "limit": 3, "max_new_tokens": 12, "repeats": 1,
        }  # fmt: skip
        run_task(Settings(task="engines", **common | sizes, engines=("recorded", "static"), grid=lookaheads))


@pytest.fixture(scope="session")
def results(results_folder: Path) -> dict[str, Result]:
    """The results by task, `subtasks` in sampling as "sampling"."""
    found = {}
    for path in results_folder.glob(f"*{SUFFIX}"):
        result = load(path)
        found["sampling" if result.settings.sampling else result.settings.task] = result
    return found
