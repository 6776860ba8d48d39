"""Linear layers and attention over few tokens on a CPU, by own kernels that read each weight once for all tokens.

Matrix libraries are tuned for many rows; for the few tokens of a round they take several times as long as reading the
weights. The kernels are C++, compiled on first use for this processor and one number type. Weights are read in place:
no copy takes memory or becomes outdated.

The alternative is inductor's own template for matrix products on a CPU (max-autotune with frozen weights). On one core
of an AMD Zen 4, over layers of 576x1536, 576x49152 and 896x4864, it took between a quarter and all of the time of an
earlier version of these kernels for 1 to 5 tokens in float32, but 1.2 to 2.1 times as long for 9 and 16, and with int8
weights mostly over twice as long. It packs a copy of all weights into the code, so equal layers could not share code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from hf_specdec.compat.torch_private import schema_of
from hf_specdec.compat.transformers_private import attention_name
from hf_specdec.host.torch_state import FunctionMode
from hf_specdec.prepared.own_code import joined, library_of
from hf_specdec.prepared.quantized_weights import QuantizedParts, parts_of
from hf_specdec.prepared.step_trace import PLAIN

# The files of each library. A library is compiled for one number type at a time, since compiling takes seconds.
LIBRARIES = {
    "wide": ("linear.cpp", "attention.cpp"),
    "quantized": ("quantized.cpp",),
    "gguf": ("gguf.cpp",),
}
NUMBERS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "BFloat16", torch.float16: "Half"}
MOST_DIMS = 8  # of an input, as in tensors.h
MOST_TOKENS = 64  # tokens of a product, over all rows, or of a row's attention; for more, libraries are faster

# The declaration of each loaded kernel's C function for inductor.
called_directly: dict[Any, list[str]] = {}


def supported() -> bool:
    """Whether the kernels support this processor; otherwise products are left to torch."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def reads_slots_in_use(model: PreTrainedModel) -> bool:
    """Whether the time of attention over few tokens depends on the row's text only, not on its cache's slots."""
    text = model.config.get_text_config(decoder=True)
    ours = supported() and model.device.type == "cpu" and model.dtype in NUMBERS
    return ours and attention_name(text) == "sdpa" and not getattr(text, "attn_logit_softcapping", None)


def operation(name: str, dtype: torch.dtype) -> str:
    """The name in `torch.ops.hf_specdec` of a kernel for a number type."""
    return f"{name}_{suffix(dtype)}"


def suffix(dtype: torch.dtype) -> str:
    """The suffix of kernel names for a number type."""
    return NUMBERS[dtype].lower()


def source(library: str, dtype: torch.dtype) -> str:
    """The C++ of one of `LIBRARIES` for a number type."""
    chosen = f"#define NUMBER {NUMBERS[dtype]}\n#define SUFFIX {suffix(dtype)}\n"
    return chosen + joined(*LIBRARIES[library])


@cache
def load(library: str, dtype: torch.dtype) -> None:
    """Compile the kernels of a library, or load them from inductor's cache, and register them in `torch.ops`.

    Raises:
        Exception: whatever inductor raises if there is no compiler or it fails.
    """
    file = str(library_of(source(library, dtype)))
    torch.ops.load_library(file)
    ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)  # inductor's code finds the functions by name
    for name, shapes in SHAPES[library].items():
        torch.library.register_fake(f"hf_specdec::{operation(name, dtype)}", shapes)
        kernel: Any = getattr(torch.ops.hf_specdec, operation(name, dtype)).default
        called_directly[kernel] = [_declaration(kernel)]


def _declaration(kernel: Any) -> str:
    """The declaration of a kernel's C function, which inductor's code calls directly to save microseconds."""
    schema = schema_of(kernel)
    kinds = {"Tensor": "AtenTensorHandle", "Optional[Tensor]": "AtenTensorHandle*", "float": "double"}
    given = [kinds[str(argument.type)] for argument in schema.arguments]
    name = schema.name.removeprefix("hf_specdec::")
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join(given + ['AtenTensorHandle*'] * len(schema.returns))})"


def library_with(name: str) -> str:
    """The one of `LIBRARIES` that holds a kernel."""
    return next(library for library, names in SHAPES.items() if name in names)


def kernel(name: str, dtype: torch.dtype) -> Any:
    """An operation of `SHAPES` for a number type, loaded on first use."""
    load(library_with(name), dtype)
    return getattr(torch.ops.hf_specdec, operation(name, dtype))


def _linear_shapes(input: Tensor, *layers: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    return _shapes(input, layers[: len(layers) // 2])


def _quantized_shapes(input: Tensor, *layers: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    return _shapes(input, layers[len(layers) // 4 : len(layers) // 2])


def _shapes(input: Tensor, by_row: Sequence[Tensor | None]) -> Tensor | tuple[Tensor, ...]:
    """Empty outputs of layers, whose numbers of rows are those of the tensors in `by_row`."""
    results = tuple(input.new_empty(*input.shape[:-1], len(rows)) for rows in cast(Sequence[Tensor], by_row))
    return results if len(results) > 1 else results[0]


def _rows_shape(like: Tensor, indices: Tensor, blocks: Tensor) -> Tensor:
    return like.new_empty(*indices.shape, like.shape[-1])


def _attention_shape(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    batch, heads, queries, width = query.shape
    return query.new_empty(batch, queries, heads, width)


# Functions for the shapes of the kernels' results, by library and name.
SHAPES: dict[str, dict[str, Callable[..., Any]]] = {
    "wide": {
        "linear": _linear_shapes,
        "linear_2": _linear_shapes,
        "linear_3": _linear_shapes,
        "attention": _attention_shape,
    },
    "quantized": {
        "quantized_linear": _quantized_shapes,
        "quantized_linear_2": _quantized_shapes,
        "quantized_linear_3": _quantized_shapes,
    },
    "gguf": {
        "gguf_linear": _linear_shapes,
        "gguf_linear_2": _linear_shapes,
        "gguf_linear_3": _linear_shapes,
        "gguf_rows": _rows_shape,
    },
}


class FewTokenProducts(FunctionMode):
    """Runs `linear` and `scaled_dot_product_attention` over few tokens by the kernels.

    Args:
        others: a mode for other linear layers; by default they are unchanged. Stacked outside this mode it would also
            intercept this one's queries of tensors, which takes longer than a small layer.
    """

    def __init__(self, others: FunctionMode | None = None) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the result of `func`, up to rounding; see docs/compiled-rounds.md for int8 weights."""
        options = kwargs or {}
        if func is functional.linear and _takes_linear(*args, **options):
            return _linear(*args, **options)
        if func is functional.linear and (quantized := _takes_quantized(*args, **options)) is not None:
            return _quantized(quantized, *args, **options)
        if func is functional.scaled_dot_product_attention and _takes_attention(*args, **options):
            return _attention(*args, **options)
        if func is functional.linear and self._others is not None:
            return self._others.__torch_function__(func, types, args, kwargs)
        return func(*args, **options)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = kernel("linear", input.dtype)(input.contiguous(), weight, bias)
    return result


def _quantized(parts: QuantizedParts, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = kernel("quantized_linear", input.dtype)
    result: Tensor = product(input.contiguous(), parts.values, parts.scale, parts.shift, bias)
    return result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    **other: Any,
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attn_mask = query.new_zeros(1, 1, 1, key.shape[2]) if attn_mask is None else attn_mask
    mixed: Tensor = kernel("attention", query.dtype)(query, key, value, attn_mask, scale)
    return mixed.transpose(1, 2)


def _takes_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return (
        type(weight) in (Tensor, torch.nn.Parameter)
        and weight.dim() == 2
        and weight.is_contiguous()
        and (_over_few_tokens(input) or _has_no_library(input.dtype))
        and _fits(input, weight, bias)
    )


def _takes_quantized(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> QuantizedParts | None:
    """The parts of a quantized weight to use; int8 also for many tokens, since its library would widen the weights."""
    plain = type(input) is Tensor and (bias is None or type(bias) in PLAIN)
    parts = parts_of(weight) if plain and _fits(input, weight, bias) else None
    few = _over_few_tokens(input) or (parts is not None and parts.values.dtype == torch.int8)
    return parts if few else None


@cache
def _has_no_library(dtype: torch.dtype) -> bool:
    """Whether oneDNN lacks products of this type on this processor, so that torch's own would be slow."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    known = getattr(torch.ops.mkldnn, name, None) if name is not None else None
    return known is not None and not known()


def _over_few_tokens(input: Tensor) -> bool:
    return input.shape[:-1].numel() <= MOST_TOKENS


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        input.numel() > 0
        and _is_ours(input)
        and input.dim() <= MOST_DIMS
        and input.dtype == weight.dtype
        and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous()))
    )


def _takes_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **other: Any,
) -> bool:
    return (
        (attn_mask is None or _fits_mask(attn_mask, query, key))
        and query.dim() == 4
        and not is_causal
        and dropout_p == 0.0
        and query.shape[2] <= MOST_TOKENS
        and key.shape == value.shape
        and _is_ours(query)
        and all(t.stride()[-2:] == (t.shape[-1], 1) for t in (key, value))
        and query.stride(-1) == 1
    )


def _fits_mask(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    return (
        mask.dtype == query.dtype
        and mask.dim() == query.dim()
        and mask.shape[-1] == key.shape[2]
        and mask.stride(-1) == 1
    )


def _is_ours(states: Tensor) -> bool:
    return states.device.type == "cpu" and states.dtype in NUMBERS
