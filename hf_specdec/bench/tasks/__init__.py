"""The tasks of the script. A task is one module: its defaults and arguments, what it runs, and its report.

Each has `DEFAULTS`, `parser()`, `run(settings, shared)`, and `render(result)` if it measures; `SHARED` says whether
several processes may share the work.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from hf_specdec.bench.settings import BenchError, Settings


def task_module(name: str) -> Any:
    """A task's module, imported when it is needed: some need packages that others do without."""
    return import_module(f"hf_specdec.bench.tasks.{name}")


def run_task(settings: Settings) -> None:
    """Runs `settings.task`; raises `BenchError` for what the user can put right."""
    import torch

    from hf_specdec.bench import results
    from hf_specdec.bench.models.names import stem
    from hf_specdec.bench.running.processes import processes

    task = task_module(settings.task)
    # Before any model is loaded, so that each process of several gets a GPU of its own.
    shared = processes(cpu=settings.device == "cpu" or not torch.cuda.is_available())
    if shared.count > 1 and not task.SHARED:
        raise BenchError(
            f"--task: {settings.task!r} times one process alone, and was started with {shared.count}; start it without "
            "torchrun, or choose subtasks, sweep, ablation or align"
        )
    if settings.task != "report":
        # Aligning judges one text at a time, whatever it trains with.
        results.check_output(task.judging(settings) if settings.task == "align" else settings)
    task.run(settings, shared)
    shared.end()
    if shared.main and settings.task != "report":
        print(f"Files of this run: {settings.output_dir / stem(settings)}.*", file=sys.stderr)
