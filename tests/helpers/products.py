"""Numbers to multiply, how far a product may be off, and steps run by their graphs."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from hf_specdec.prepared.few_token_products import FewTokenProducts
from hf_specdec.prepared.joined_layers import join_linears
from hf_specdec.prepared.step_trace import trace, value_of

# The error of a sum of a few hundred products, and that of rounding the result once.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def run(graph: Graph, *given: Tensor) -> list[Tensor]:
    constants = {node.target: value_of(node) for node in graph.nodes if node.op == "get_attr"}
    return GraphModule(constants, graph)(*given)


def joined(step: Callable[..., list[Tensor]], *given: Tensor) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """The products of a step whose layers of one input are joined, what its graph then computes, and what it does."""
    with torch.no_grad(), FewTokenProducts():
        graph, each = trace(step, *given), step(*given)
    join_linears(graph)
    return [str(node.target) for node in graph.nodes if "linear" in str(node.target)], run(graph, *given), each
