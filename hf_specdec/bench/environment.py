"""The environment of a run: versions, hardware, load, and the commit of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import hf_specdec
from hf_specdec.bench.records import Environment
from hf_specdec.models.processor import reported

_MOMENT = 0.2  # seconds over which load is measured
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def describe() -> Environment:
    """Describe the environment of this process."""
    changes = _git("status", "--porcelain")
    return Environment(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages={"hf_specdec": hf_specdec.__version__} | {name: _version(name) for name in _PACKAGES},
        cpu=reported("model name") or "unknown",
        instructions=_instructions(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        torch_threads=torch.get_num_threads(),
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
        busy_cores=busy_cores(),
        commit=_git("rev-parse", "HEAD"),
        # None outside a checkout.
        dirty=None if changes is None else bool(changes),
    )


def _instructions() -> str:
    """The widest vector instructions, and AMX if available: processors of one name can differ in them."""
    widest = torch.backends.cpu.get_cpu_capability()
    return f"{widest}, AMX" if "amx_int8" in reported("flags").split() else widest


def busy_cores() -> float | None:
    """Measure how many cores are busy with other work while this process idles; None without psutil.

    The load average would include what this process itself did in the minutes before.
    """
    try:
        import psutil
    except ModuleNotFoundError:
        return None
    return float(round(psutil.cpu_percent(_MOMENT) / 100 * (psutil.cpu_count() or 1), 2))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """The output of git in this folder; None without git, or if git does not track this file."""
    file = Path(__file__).resolve()
    try:
        # An installed copy may be in an environment inside some unrelated checkout.
        for command in (["ls-files", "--error-unmatch", file.name], arguments):
            done = subprocess.run(
                ["git", "-C", str(file.parent), *command], capture_output=True, text=True, timeout=10, check=True
            )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
