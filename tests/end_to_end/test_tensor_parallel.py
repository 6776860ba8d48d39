"""A target sharded over processes (`tp_plan="auto"` under torchrun): all processes decide alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

from helpers import models

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "helpers" / "tensor_parallel_run.py"


def test_processes_with_seeds_and_clocks_of_their_own_decode_the_same_text(tmp_path) -> None:
    """Where they decide apart, one waits for a pass that the other does not make, and torchrun reports its death."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    target = models.llama()
    for role, model in (("target", target), ("draft", models.noisy(target))):
        model.save_pretrained(tmp_path / role)
    arguments = [str(tmp_path / "target"), str(tmp_path / "draft"), str(tmp_path)]
    run = subprocess.run([*torchrun, str(PROGRAM), *arguments], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    first, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert other == first
    for draft in ("replicated", "sharded"):
        assert first[f"{draft}, greedy"] == first[f"{draft}, greedy, auto"] == first["plain"]
        assert first[f"{draft}, sampled"] != first["plain"]
