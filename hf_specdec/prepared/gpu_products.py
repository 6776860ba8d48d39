"""Linear layers over few tokens on a GPU, by an own kernel that computes up to three layers of one input at once.

Matrix libraries start a kernel for each layer, and another one to add up the parts of a small layer. Weights are read
in place: no copy takes memory or becomes outdated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from hf_specdec.host.torch_state import FunctionMode
from hf_specdec.prepared.few_token_products import SHAPES
from hf_specdec.prepared.step_trace import PLAIN

MOST_TOKENS = 16  # tokens of a pass, over all rows: as many as tensor cores compute at a time
LEAST_SHARED_MEMORY = 99 * 2**10  # bytes per block, available on any GPU of compute capability 8.0 or newer
NUMBERS = (torch.bfloat16, torch.float16)
DEVICE = "cuda"
NAMESPACE = "hf_specdec_cuda"
SCHEMAS = {
    "linear": "(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    "linear_2": "(Tensor input, Tensor w0, Tensor w1, Tensor? b0, Tensor? b1) -> (Tensor, Tensor)",
    "linear_3": "(Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor? b0, Tensor? b1, Tensor? b2)"
    " -> (Tensor, Tensor, Tensor)",
}


@dataclass(frozen=True)
class Tiles:
    """The tiling of a product.

    Args:
        rows: outputs per block.
        columns: columns of their weights to read at a time.
        stages: the number of reads in flight.
    """

    rows: int
    columns: int
    stages: int

    @property
    def shared_memory(self) -> int:
        """The shared memory that a block needs, in bytes."""
        return 2 * (self.rows + MOST_TOKENS) * self.columns * self.stages


# The fastest of 54 on an H200 for the layers of LLaMA-2-7B: with more blocks than multiprocessors, so that some run
# two or three; with about half as many; and with fewer.
MANY, SOME, FEW = Tiles(64, 128, stages=3), Tiles(64, 128, stages=8), Tiles(32, 256, stages=4)


class GpuProducts(FunctionMode):
    """Runs `linear` over few tokens by the kernel; other operations are unchanged."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the result of `func`, up to the order of additions."""
        options = kwargs or {}
        if func is functional.linear and _takes(*args, **options):
            return _product(*args, **options)
        return func(*args, **options)


def linears(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], tiles: Tiles | None = None
) -> list[Tensor]:
    """The outputs `[..., N]` of one to three layers of an input `[..., K]`, summed in float32.

    Args:
        input: of at most `MOST_TOKENS` tokens.
        weights: `[N, K]` each, contiguous.
        biases: `[N]` each, or None.
        tiles: by default the fastest for this number of rows, see `_tiles_for`.
    """
    tokens, width = input.shape[:-1].numel(), input.shape[-1]
    outputs = [input.new_empty(*input.shape[:-1], len(weight)) for weight in weights]
    rows = [len(weight) for weight in weights]
    tiles = tiles or _tiles_for(sum(rows), input.device)
    biased = any(bias is not None for bias in biases)
    added = [
        bias if bias is not None else input.new_zeros(len(weight)) if biased else weight
        for bias, weight in zip(biases, weights, strict=True)
    ]
    blocks = sum(triton.cdiv(count, tiles.rows) for count in rows)
    # Triton launches on the current device, not on that of the tensors.
    with torch.cuda.device_of(input):
        _linears[(blocks,)](
            input.contiguous(),
            *_three(weights),
            *_three(added),
            *_three(outputs),
            tokens,
            *rows,
            *[0] * (3 - len(rows)),
            width,
            biased=biased,
            whole=width % tiles.columns == 0,
            places=MOST_TOKENS,
            height=tiles.rows,
            span=tiles.columns,
            num_stages=tiles.stages,
            num_warps=4,
        )
    return outputs


# No type annotations, since Triton interprets them.
@triton.jit
def _linears(  # type: ignore[no-untyped-def]
    input, weight_0, weight_1, weight_2, bias_0, bias_1, bias_2, output_0, output_1, output_2,
    tokens, rows_0, rows_1, rows_2, width,
    biased: tl.constexpr, whole: tl.constexpr, places: tl.constexpr, height: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """Compute one block: `height` outputs of one of the layers, for all tokens, padded to `places`.

    `whole` says that the width is a multiple of `span`, the columns of a step.
    """
    block = tl.program_id(0)
    weight, bias, output, rows = weight_0, bias_0, output_0, rows_0
    end_0 = tl.cdiv(rows_0, height)
    end_1 = end_0 + tl.cdiv(rows_1, height)
    if block >= end_1:
        weight, bias, output, rows = weight_2, bias_2, output_2, rows_2
        block -= end_1
    elif block >= end_0:
        weight, bias, output, rows = weight_1, bias_1, output_1, rows_1
        block -= end_0
    row = block * height + tl.arange(0, height)
    token, column = tl.arange(0, places)[None, :], tl.arange(0, span)
    weights = weight + tl.minimum(row, rows - 1)[:, None].to(tl.int64) * width + column[None, :]
    inputs = input + token * width + column[:, None]
    sums = tl.zeros([height, places], tl.float32)
    for start in range(0, width, span):
        if whole:
            read = tl.load(weights, eviction_policy="evict_first")
            given = tl.load(inputs, mask=token < tokens, other=0.0)
        else:
            inside = column < width - start
            read = tl.load(weights, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            given = tl.load(inputs, mask=inside[:, None] & (token < tokens), other=0.0)
        sums = tl.dot(read, given, sums)
        weights += span
        inputs += span
    if biased:
        sums += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    kept = (row[:, None] < rows) & (token < tokens)
    tl.store(output + token * rows + row[:, None], sums.to(output.dtype.element_ty), mask=kept)


def _three(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Repeat the last tensor to get three, the number of the kernel's arguments; the repetitions are not read."""
    return [*tensors, *[tensors[-1]] * (3 - len(tensors))]


def _tiles_for(rows: int, device: torch.device) -> Tiles:
    """The tiles for layers with `rows` rows in all, by the number of blocks of 64 rows per multiprocessor."""
    multiprocessors, shared_memory = _resources(device)
    blocks = rows / (SOME.rows * multiprocessors)
    if blocks >= 1:
        return MANY
    return SOME if blocks >= 0.4 and SOME.shared_memory <= shared_memory else FEW


def _resources(device: torch.device) -> tuple[int, int]:
    """A GPU's number of multiprocessors, and the shared memory available to a block, in bytes."""
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", LEAST_SHARED_MEMORY)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.hf_specdec_cuda.linear(input, weight, bias)
    return product


def _takes(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return (
        type(input) is Tensor
        and type(weight) in PLAIN
        and input.device.type == weight.device.type == DEVICE
        and input.dtype == weight.dtype
        and input.dtype in NUMBERS
        and weight.dim() == 2
        and weight.is_contiguous()
        and 0 < input.shape[:-1].numel() <= MOST_TOKENS
        and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous()))
    )


def _operation(input: Tensor, *layers: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """`linear`, `linear_2` and `linear_3`: `layers` holds the weights, then the biases."""
    count = len(layers) // 2
    outputs = linears(input, cast(Sequence[Tensor], layers[:count]), layers[count:])
    return tuple(outputs) if count > 1 else outputs[0]


def _registered() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _operation, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", SHAPES["wide"][name], lib=library)
    return library


_library = _registered()  # the operations live as long as it does
