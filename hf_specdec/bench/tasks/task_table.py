"""From the task's name to what does it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

import torch

from hf_specdec.bench.running.processes import processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage.results import stem

# Each is `run_NAME` of the module of its name, imported when it runs: some need packages that others do without.
_ALONE = ("benchmark", "decode", "engines", "report", "tune")
_SHARED = ("subtasks", "sweep", "ablation", "align")


def run_task(settings: Settings) -> None:
    """Runs `settings.task`; raises `BenchError` for what the user can put right."""
    # Before any model is loaded, so that each process of several gets a GPU of its own.
    shared = processes(cpu=settings.device == "cpu" or not torch.cuda.is_available())
    if settings.task in _SHARED:
        _of(settings.task)(settings, shared)
        shared.end()
        if shared.main:
            _say_where(settings)
    elif shared.count > 1:
        raise BenchError(
            f"--task: {settings.task!r} times one process alone, and was started with {shared.count}; start it without "
            "torchrun, or choose subtasks, sweep, ablation or align"
        )
    else:
        _of(settings.task)(settings)
        _say_where(settings)


def _say_where(settings: Settings) -> None:
    if settings.task != "report":
        print(f"Files of this run: {settings.output_dir / stem(settings)}.*", file=sys.stderr)


def _of(task: str) -> Callable[..., None]:
    run: Callable[..., None] = getattr(import_module(f"hf_specdec.bench.tasks.{task}"), f"run_{task}")
    return run
