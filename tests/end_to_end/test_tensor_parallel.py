"""A target sharded over processes (`tp_plan="auto"` under torchrun): all of them decide alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "helpers" / "tensor_parallel_run.py"


@pytest.mark.parametrize("draft", ["replicated", "sharded"])
def test_processes_with_seeds_and_clocks_of_their_own_decode_the_same_text(
    saved_pair: tuple[Path, Path], draft: str, tmp_path: Path
) -> None:
    """Where they decide apart, one waits for a pass that the other does not make, and torchrun reports its death."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = [*map(str, saved_pair), draft, str(tmp_path)]
    run = subprocess.run(
        [*torchrun, str(PROGRAM), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["greedy"] == first["greedy, auto"] == first["plain"]
    assert first["sampled"] != first["plain"]
