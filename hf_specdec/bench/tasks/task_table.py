"""From the task's name to what does it."""

from __future__ import annotations

import torch

from hf_specdec.bench.running.processes import processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks.ablation import run_ablation
from hf_specdec.bench.tasks.align import run_align
from hf_specdec.bench.tasks.benchmark import run_benchmark
from hf_specdec.bench.tasks.decode import run_decode
from hf_specdec.bench.tasks.engines import run_engines
from hf_specdec.bench.tasks.growth import run_growth
from hf_specdec.bench.tasks.report import run_report
from hf_specdec.bench.tasks.rollback import run_rollback
from hf_specdec.bench.tasks.subtasks import run_subtasks
from hf_specdec.bench.tasks.sweep import run_sweep
from hf_specdec.bench.tasks.tune import run_tune

_ALONE = {
    "benchmark": run_benchmark,
    "decode": run_decode,
    "engines": run_engines,
    "growth": run_growth,
    "report": run_report,
    "rollback": run_rollback,
    "tune": run_tune,
}
_SHARED = {"subtasks": run_subtasks, "sweep": run_sweep, "ablation": run_ablation, "align": run_align}


def run_task(settings: Settings) -> None:
    """Runs `settings.task`; raises `BenchError` for what the user can put right."""
    # Before any model is loaded, so that each process of several gets a GPU of its own.
    shared = processes(cpu=settings.device == "cpu" or not torch.cuda.is_available())
    if settings.task in _SHARED:
        _SHARED[settings.task](settings, shared)
    elif shared.count > 1:
        raise BenchError(
            f"--task: {settings.task!r} times one process alone, and was started with {shared.count}; start it without "
            "torchrun, or choose subtasks, sweep, ablation or align"
        )
    else:
        _ALONE[settings.task](settings)
