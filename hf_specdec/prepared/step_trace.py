"""Traces a step to a graph of operations on tensors, by running it once and recording every operation.

`torch.fx.experimental.proxy_tensor.make_fx` makes the same graph, but takes a millisecond for each operation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.weak import WeakTensorKeyDictionary

from hf_specdec.compat.torch_private import TorchDispatchMode, is_composite, pytree
from hf_specdec.models.recorded_passes import depends_on_values

PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class Layout:
    """The form of a tensor that a step computes."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stride(self) -> tuple[int, ...]:
        """The strides, like `Tensor.stride`."""
        return self.strides


def trace(step: Callable[..., Sequence[Tensor]], *given: Tensor) -> Graph:
    """Run a step and return its operations.

    Placeholders represent the arguments, in order; `get_attr` nodes represent other tensors that the step reads, such
    as weights. See `value_of`.

    Raises:
        RuntimeError: the step reads values of tensors on the host, so another call might behave differently.
    """
    recorder = _Recorder()
    # A tensor given twice is two arguments, which may differ at the next call.
    given = tuple(
        tensor.view_as(tensor) if id(tensor) in map(id, given[:at]) else tensor for at, tensor in enumerate(given)
    )
    for at, tensor in enumerate(given):
        recorder.note(tensor, recorder.graph.placeholder(f"given_{at}"))
    with recorder:
        results = step(*given)
    recorder.graph.output([recorder.node_of(tensor) for tensor in results])
    return recorder.graph


def value_of(node: Node) -> Any:
    """The tensor of a `get_attr` node; for other nodes the `Layout`, or those of several results."""
    return node.meta["val"]


class _Recorder(TorchDispatchMode):
    """Records operations below autograd, where composite ones are decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.nodes: Any = WeakTensorKeyDictionary()

    def note(self, value: Any, node: Node) -> None:
        """Map a tensor, or several, to a node."""
        if isinstance(value, Tensor):
            self.nodes[value] = node
            node.meta["val"] = Layout(value.shape, value.stride(), value.dtype, value.device)
        elif isinstance(value, (tuple, list)):
            for at, part in enumerate(value):
                self.note(part, self.graph.call_function(operator.getitem, (node, at)))
            node.meta["val"] = None

    def node_of(self, tensor: Tensor) -> Node:
        """The node of a tensor; a tensor that no operation has made becomes a constant."""
        if tensor not in self.nodes:
            node = self.graph.create_node("get_attr", f"constant_{len(self.graph.nodes)}")
            node.meta["val"] = tensor
            self.nodes[tensor] = node
        found: Node = self.nodes[tensor]
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note it."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(type(tensor) in PLAIN for tensor in tensors):
            return NotImplemented  # its class decomposes it into operations on plain tensors
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if depends_on_values(func, args):
            raise RuntimeError(f"{func} reads values of a tensor, which may differ at the next call")
        # The result of `torch.tensor` is a constant, which the step must not write to.
        func = torch.ops.aten.lift_fresh_copy.default if func is torch.ops.aten.lift_fresh.default else func
        node_args, node_kwargs = pytree.tree_map_only(Tensor, self.node_of, (args, kwargs))
        node = self.graph.call_function(func, node_args, node_kwargs)
        result = func(*args, **kwargs)
        self.note(result, node)
        return result
