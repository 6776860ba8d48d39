"""What a compiled step on a CPU makes of linear layers and attention: loops over few tokens, hardly a library's call.

Matrix libraries are made for wide products: for the few tokens of a round they take several times what reading the
weights takes. Written as sums of products, `torch.compile` turns them into loops that read each weight once for all
tokens, and puts what stands between them into the same loops. Weights are read where they are, so that no copy of
them takes memory or goes stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# For inductor: what is read more than once is computed once (each token of a layer's input is a reader), a product is
# added in the same instruction, and shapes, which never change, are not compared in every pass.
OPTIONS = {"realize_reads_threshold": 0, "cpp.enable_floating_point_contract_flag": "fast", "size_asserts": False}
WIDEST = 10  # tokens of a pass, all rows' together; behind that the code grows faster than the gain
DTYPES = (torch.float32, torch.float64)  # narrower ones have instructions of their own, which loops don't use


def as_loops(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose narrow products are sums; only to be compiled, since uncompiled sums of products are slow."""

    def looped(*args: Any) -> Any:
        with NarrowProducts():
            return step(*args)

    return looped


class NarrowProducts(TorchFunctionMode):
    """Writes `linear` and `scaled_dot_product_attention` as sums of products, where they are over few tokens."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What `func` returns, but for the order of additions."""
        options = kwargs or {}
        if func is functional.linear and _is_narrow_linear(*args, **options):
            return linear(*args, **options)
        if func is functional.scaled_dot_product_attention and _is_narrow_attention(*args, **options):
            return attention(*args, **options)
        return func(*args, **options)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` of a few tokens, a sum for each; `[..., K]` and `[N, K]` to `[..., N]`."""
    tokens = input.reshape(-1, input.shape[-1])
    output = torch.stack([(tokens[at] * weight).sum(dim=-1) for at in range(len(tokens))])
    if bias is not None:
        output = output + bias
    return output.view(*input.shape[:-1], len(weight))


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, *, scale: float | None = None, **other: Any
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` of a few queries, with a mask and without dropout.

    Args:
        query: `[B, H, Q, D]`.
        key, value: `[B, H_kv, K, D]`; heads of queries share them evenly.
        attn_mask: bool or additive, for `[B, H, Q, K]`.
        scale: of the scores; 1 / √D by itself.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    tokens = range(query.shape[2])
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.stack([(query[:, :, at, None] * key).sum(dim=-1) for at in tokens], dim=2)
    scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    total = _piece_ends(weights.sum(dim=-1))
    mixed = [(weights[:, :, at, :, None] * value).sum(dim=-2) / total[:, :, at, None] for at in tokens]
    # In the order in which models read it.
    return torch.stack(mixed, dim=1).transpose(1, 2)


def _piece_ends(states: Tensor) -> Tensor:
    """The same states, by a call that loops can't be merged across.

    All between two calls is one piece of code, and equal pieces are compiled, and kept in the processor's cache, once.
    So every layer has a call, of the least that takes one: a cumulative sum of one summand.
    """
    return states.unsqueeze(0).cumsum(dim=0).squeeze(0)


def _is_narrow_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.dim() == 2
    tokens = input.shape[:-1].numel()
    return plain and 0 < tokens <= WIDEST and input.dtype == weight.dtype and input.dtype in DTYPES


def _is_narrow_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **other: Any,
) -> bool:
    known = attn_mask is not None and not is_causal and dropout_p == 0.0 and query.dim() == 4
    return known and len(query) * query.shape[2] <= WIDEST and query.dtype in DTYPES
