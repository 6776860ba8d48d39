"""Peak memory: at least the weights and caches, and more where a method allocates more; the report shows it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage.results import load
from hf_specdec.bench.tasks import engines, peak_memory

TINY = "synthetic:tiny-llama"

# Each measurement has a process of its own, as in the task: memory that was given back is used again unseen.
MEASURED = """
import contextlib, json, sys
from dataclasses import replace
import torch
from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.tasks import peak_memory

settings = Settings(task="engines", model_name="synthetic:smollm-135m:draft=64x1", assisted_generation=True,
                    dtype="bfloat16", max_new_tokens=2)

@contextlib.contextmanager
def holding(pair):
    yield torch.ones(int(sys.argv[1]), dtype=torch.uint8)

base = peak_memory._status("VmRSS")
pair = load_pair(settings)
prompts = benchmark_prompts(pair, (8,), 1, 2)
method = replace(plain(), surroundings=holding)
print(json.dumps(peak_memory.measured(pair, method, prompts, settings, base)))
"""


def measured(more: int) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", MEASURED, str(more)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_holds_weights_and_caches_and_grows_by_what_a_method_allocates() -> None:
    needed, peaks = set(), []
    for more in (0, 150_000_000):
        found = measured(more)
        needed.add(found["weight_bytes"] + found["cache_bytes"])
        peaks.append(found["peak_bytes"] - found["base_bytes"])
        assert found["cache_bytes"] == 10 * 2 * 2 * (30 * 3 * 64 + 64)
    (bytes_needed,) = needed
    assert 1 <= peaks[0] / bytes_needed < 1.4
    assert peaks[1] - peaks[0] == pytest.approx(150e6, abs=40e6)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_task_measures_after_its_own_pair_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        task="engines", model_name=TINY, assisted_generation=True, max_new_tokens=4, prompt_lengths=(8,), limit=1,
        engines=("eager",), grid={"num_assistant_tokens": (2,)}, peak_memory=True, output_dir=tmp_path,
    )  # fmt: skip
    alive, asked = [], []

    def loaded(settings: Settings) -> Any:
        pair = load_pair(settings)
        alive.extend(map(weakref.ref, pair.models))
        return pair

    def apart(settings: Settings, method: str, engine: str, batch: int) -> dict[str, Any] | None:
        asked.append(method)
        assert [model() for model in alive] == [None, None]
        return real(settings, method, engine, batch) if method in ("plain", "speculative, γ = 2, eager") else None

    real = peak_memory.measured_apart
    monkeypatch.setattr(engines, "load_pair", loaded)
    monkeypatch.setattr(engines, "measured_apart", apart)
    gc.collect()
    engines.run_engines(settings)
    (path,) = tmp_path.glob("*.json.gz")
    result = load(path)
    assert [item["method"] for item in result["peak_memory"]] == ["plain", "speculative, γ = 2, eager"]
    assert sum("process failed" in note for note in result["notes"]) == len(asked) - 2 == 3
    assert sum(name.startswith("assisted") for name in asked) == 1
    table = path.with_name(path.name.replace(".json.gz", ".md")).read_text().split("## Peak memory")[1]
    assert "| 1            | Plain generate()" in table.split("##")[0]


@pytest.mark.parametrize(("compiled", "processes"), [([False], 1), ([True, False], 2), ([True] * 9, 3)])
def test_a_process_that_compiles_is_followed_by_another(
    compiled: list[bool], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(enumerate(compiled, start=1))

    def run(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        number, compiles = next(left)
        return subprocess.CompletedProcess(args, 0, json.dumps({"compiled": compiles, "peak_bytes": number}))

    monkeypatch.setattr(peak_memory.subprocess, "run", run)
    found = peak_memory.measured_apart(Settings(task="engines", model_name=TINY), "plain", "compiled", 1)
    assert found == {"compiled": compiled[processes - 1], "peak_bytes": processes}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_libraries_do_not_count() -> None:
    settings = Settings(
        task="engines", model_name=TINY, assisted_generation=True, precision="int8",
        draft_precision="int8", max_new_tokens=2, prompt_lengths=(8,), engines=("eager",),
    )  # fmt: skip
    found = peak_memory.measured_apart(settings, "plain", "eager", 1)
    assert found is not None
    assert found["base_bytes"] > libraries_bytes() - 5e6
    assert not found["compiled"]


def libraries_bytes() -> int:
    """Resident bytes of a process that has imported what int8 weights need, but loaded no model."""
    code = "import optimum.quanto\nfrom hf_specdec.bench.tasks import peak_memory\nprint(peak_memory._status('VmRSS'))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def test_where_it_cannot_be_measured_it_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(peak_memory.torch.cuda, "is_available", lambda: False)
    settings = Settings(task="engines", model_name=TINY, peak_memory=True, output_dir=tmp_path)
    with pytest.raises(BenchError, match=r"^--peak_memory: .* leave it out"):
        engines.run_engines(settings)
    peak_memory.check_peak_memory(replace(settings, peak_memory=False))
