"""Run with `TRITON_INTERPRET=1`: the kernel for GPUs on the CPU, on its own and in compiled steps of models."""

from collections import Counter
from collections.abc import Sequence

import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.nn.functional import linear

from helpers.identity import speculated
from helpers.patches import interpret_compiled_steps
from hf_specdec.bench.models import synthetic
from hf_specdec.bench.models.synthetic import SHAPES
from hf_specdec.prepared import compiled_step, engine, gpu_products
from hf_specdec.prepared.gpu_products import GpuProducts, Tiles, linears

CPU, HALF = torch.device("cpu"), torch.float16  # the interpreter computes bfloat16 wrongly


def check_products() -> None:
    """Up to rounding, they are those of the layers in float64; the rows of a layer in another order are not."""
    torch.manual_seed(0)
    for tokens, width, rows in ((1, 96, (40,)), (5, 256, (64, 48, 16)), (16, 64, (33, 32))):
        states = torch.randn(1, tokens, width, dtype=HALF)
        weights = [torch.randn(count, width, dtype=HALF) / width**0.5 for count in rows]
        for biases in ([None] * len(rows), [torch.randn(rows[0], dtype=HALF), *[None] * (len(rows) - 1)]):
            for tiles in (Tiles(16, 64, stages=3), Tiles(32, 128, stages=3)):
                outputs = linears(states, weights, biases, tiles)
                for output, weight, bias in zip(outputs, weights, biases, strict=True):
                    wanted = linear(states.double(), weight.double(), None if bias is None else bias.double())
                    assert _error(output, wanted) < 2e-3 < _error(output, wanted.flip(-1)), (tokens, width, rows)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def check_models() -> None:
    """Steps compiled with the kernel, as on a GPU, give the tokens of plain decoding, and join layers of one input."""
    gpu_products.DEVICE = "cpu"
    gpu_products._resources = lambda device: (2, 2**20)
    for name in gpu_products.SCHEMAS:
        gpu_products._library.impl(name, gpu_products._operation, "CPU")
    for module in (compiled_step, engine):
        module.kernels_as_compiled = lambda device, compile=True: GpuProducts()
    together = Counter[int]()
    # Interpreted, a block of the kernel takes milliseconds.
    synthetic.SHAPES = {name: {**shape, "num_hidden_layers": 2, "vocab_size": 160} for name, shape in SHAPES.items()}

    def counted(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
        together[len(weights)] += 1
        return linears(input, weights, biases)

    gpu_products.linears = counted
    for shape in ("tiny-qwen2", "tiny-opt"):
        if shape == "tiny-opt":  # inductor takes most of the time, and one model shows what it makes of the kernel
            interpret_compiled_steps(MonkeyPatch())
        target, draft, _ = synthetic.build(synthetic.parse(f"synthetic:{shape}"), CPU, HALF, CPU, HALF)
        given = {"input_ids": torch.arange(10, 30).unsqueeze(0), "max_new_tokens": 6, "do_sample": False}
        plain = target.generate(**given)
        found = speculated(
            target, None, **given, assistant_model=draft, num_assistant_tokens=2, compile=True, disable_tqdm=True
        )
        assert torch.equal(found, plain), shape
        assert together[3] and bool(together[2]) == (shape != "tiny-opt"), (shape, together)
        together.clear()


if __name__ == "__main__":
    check_products()
    check_models()
