"""The kernel for GPUs without one: what it is compiled to, and what Triton's interpreter computes with it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.pairwise import pairwise

triton = pytest.importorskip("triton", minversion="3.6")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hf_specdec.prepared import gpu_products  # noqa: E402
from hf_specdec.prepared.gpu_products import FEW, LEAST_SHARED_MEMORY, MANY, MOST_TOKENS, SOME, Tiles  # noqa: E402

ROOT = Path(__file__).parents[2]
ALIGNED = [["tt.divisibility", 16]]


@pytest.mark.parametrize(
    ("capability", "number", "tiles", "biased", "whole"),
    pairwise((80, 90), ("bf16", "fp16"), (MANY, SOME, FEW), (True, False), (True, False)),
    ids=str,
)
def test_it_compiles_to_wide_copies_ahead_of_the_products(
    capability: int, number: str, tiles: Tiles, biased: bool, whole: bool, tmp_path, monkeypatch
) -> None:
    """All weights pass through shared memory, 16 bytes at a time, without waiting for each; only biases are loaded."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = gpu_products._linears
    fixed = {"biased": biased, "whole": whole, "places": MOST_TOKENS, "height": tiles.rows, "span": tiles.columns}
    names = kernel.arg_names
    tensors = {name for name in names if name.startswith(("input", "weight", "bias_", "output"))}
    kinds = {n: "constexpr" if n in fixed else f"*{number}" if n in tensors else "i32" for n in names}
    source = ASTSource(
        kernel,
        kinds,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(at,): ALIGNED for at, name in enumerate(names) if name not in fixed and name != "tokens"},
    )
    options = {"num_warps": 4, "num_stages": tiles.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= tiles.shared_memory
    assert tiles is SOME or tiles.shared_memory <= LEAST_SHARED_MEMORY
    code = compiled.asm["ptx"]
    assert set(re.findall(r"cp\.async\.c[ga]\.shared\.global[^;]*?, (0x\w+|\d+)", code)) == {"0x10"}
    assert ("ld.global" in code) == biased


@pytest.mark.parametrize("memory", [LEAST_SHARED_MEMORY, SOME.shared_memory])
def test_tiles_fit_into_a_block_s_memory(memory: int, monkeypatch) -> None:
    monkeypatch.setattr(gpu_products, "_resources", lambda device: (100, memory))
    chosen = {gpu_products._tiles_for(rows, torch.device("cuda")) for rows in range(64, 10_000, 64)}
    assert all(tiles.shared_memory <= memory for tiles in chosen)
    assert chosen == {MANY, FEW} | ({SOME} if memory == SOME.shared_memory else set())


@pytest.mark.compiles
def test_its_results_are_those_of_the_layers_one_by_one() -> None:
    """Up to rounding; the tokens of models are the same. Triton decides when it is imported whether it interprets."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests"))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "helpers.interpreted_products"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
