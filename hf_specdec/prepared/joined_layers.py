"""Changes to a traced step: layers of one input are computed together, and shared heads are read in place."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from hf_specdec.prepared.few_token_products import NUMBERS, suffix
from hf_specdec.prepared.step_trace import value_of

# An own kernel: its namespace in `torch.ops`, its name, and its number type.
KERNEL = re.compile(rf"(hf_specdec\w*)\.(\w+?)((?:_(?:{'|'.join(map(suffix, NUMBERS))}))?)\.default")
# Kernels that have a `linear_2` and a `linear_3`, for layers of one input.
LINEAR = ("linear", "quantized_linear", "gguf_linear")


def join_linears(trace: Graph) -> None:
    """Compute linear layers of one input, such as queries, keys and values, in one call.

    Such layers are small, so the calls take a considerable part of the time.
    """
    alike: dict[tuple[Any, ...], list[Node]] = {}
    for node in trace.nodes:
        if _kernel(node) in LINEAR and all(map(_stands_ready, node.all_input_nodes[1:])):
            alike.setdefault((node.target, node.args[0], *map(_kind, node.args[1:-1])), []).append(node)
    for nodes in alike.values():
        for at in range(0, len(nodes), 3):
            _join(trace, nodes[at : at + 3])


def _kernel(node: Node) -> str | None:
    """The name of the own kernel that a node calls, without its number type."""
    found = KERNEL.fullmatch(str(node.target))
    return found[2] if found else None


def _for_several(node: Node, count: int) -> Any:
    """The kernel that computes `count` layers of a node's kind at once."""
    found = KERNEL.fullmatch(str(node.target))
    assert found is not None
    namespace, name, numbers = found.groups()
    return getattr(getattr(torch.ops, namespace), f"{name}_{count}{numbers}").default


def _stands_ready(node: Node) -> bool:
    """Whether a node is an input, a constant, or a view of one."""
    view = node.target is torch.ops.aten.view.default
    return node.op != "call_function" or (view and all(map(_stands_ready, node.all_input_nodes)))


def _kind(part: Any) -> Any:
    """The properties that layers must share to be computed in one call: all except the number of rows."""
    return (value_of(part).dtype, value_of(part).shape[1:]) if isinstance(part, Node) else None


def _join(trace: Graph, nodes: Sequence[Node]) -> None:
    if len(nodes) == 1:
        return
    for node in nodes[1:]:
        for given in node.all_input_nodes[1:]:
            _move_before(nodes[0], given)
    # Grouped by kind: all weights, then the layers' other tensors, biases last.
    parts = [part for kind in zip(*(node.args[1:] for node in nodes), strict=True) for part in kind]
    with trace.inserting_before(nodes[0]):
        joined = trace.call_function(_for_several(nodes[0], len(nodes)), (nodes[0].args[0], *parts))
        joined.meta["val"] = None
        for at, node in enumerate(nodes):
            part = trace.call_function(operator.getitem, (joined, at))
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
    for node in nodes:
        trace.erase_node(node)


def _move_before(first: Node, node: Node) -> None:
    """Move an input or constant, with the nodes that it views, before another node."""
    if node.op != "placeholder":
        for given in node.all_input_nodes:
            _move_before(first, given)
        first.prepend(node)


def share_heads(trace: Graph) -> None:
    """Let attention read keys and values that several heads share in place, instead of copying them for each head.

    Models repeat them by `unsqueeze`, `expand` and `reshape`, which would copy the cache in every pass.
    """
    for node in trace.nodes:
        if _kernel(node) == "attention":
            key, value = (_before_repeating(arg) for arg in node.args[1:3])
            if key is not None and value is not None:
                node.update_arg(1, key)
                node.update_arg(2, value)


def _before_repeating(node: Node) -> Node | None:
    """The shared heads `[B, H_kv, S, D]` that a node repeats, or None."""
    aten = torch.ops.aten
    for targets in ((aten._unsafe_view.default, aten.view.default), (aten.clone.default,), (aten.expand.default,)):
        if node.op != "call_function" or node.target not in targets:
            return None
        node = cast(Node, node.args[0])
    if node.op != "call_function" or node.target is not aten.unsqueeze.default or node.args[1] != 2:
        return None
    shared = cast(Node, node.args[0])
    states = shared.meta.get("val")
    contiguous = states is not None and states.stride()[-2:] == (states.shape[-1], 1)
    return shared if contiguous else None
