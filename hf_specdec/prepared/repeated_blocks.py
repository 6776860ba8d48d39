"""Cuts a traced step into segments, so that a model's layers, which are equal, are compiled once.

A trace lists the operations of all layers one after another. The longest run that repeats with a fixed period consists
of the layers; each period becomes a segment, as do the parts before and after. If layers of a few kinds alternate
irregularly, as where a GGUF file mixes types of weights, segments begin at an operation that every layer has. Segments
with equal operations, shapes and wiring are one function of different tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from hf_specdec.compat.torch_private import schema_of
from hf_specdec.prepared.step_trace import value_of

LEAST_REPEATS = 6  # with fewer layers, calling segments one by one costs more than compiling all layers
LEAST_PERIOD = 8


@dataclass(frozen=True)
class Segment:
    """A part of a trace as a function of tensors.

    Args:
        graph: maps `inputs` to a list of the values of `outputs`; equal segments share it.
        inputs: nodes of the trace, including constants.
        outputs: nodes that later segments or the result use.
        key: equal for segments that are the same function.
    """

    graph: Graph
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    key: Hashable


def segments_of(trace: Graph) -> list[Segment]:
    """The segments of a trace, in order; only one if nothing repeats.

    Each segment makes the views that it reads, so that none returns a view of memory to which another one writes.
    """
    units = _units(trace)
    cuts = _cuts(units)
    parts = [[node for unit in units[start:end] for node in unit] for start, end in pairwise(cuts)]
    place = {node: at for at, part in enumerate(parts) for node in part}
    closed = [_with_views(part, place) for part in parts]
    used = {_identity(arg) for at, part in enumerate(closed) for arg in _outside(part)}
    used |= {*trace.output_node().all_input_nodes}
    # Equal parts must return the same of their values to stay equal.
    returned: dict[Hashable, set[int]] = {}
    keys = [_key(part) for part in closed]
    for key, part in zip(keys, closed, strict=True):
        returned.setdefault(key, set()).update(at for at, node in enumerate(part) if node in used and node in place)
    graphs: dict[Hashable, Graph] = {}
    segments = []
    for key, part in zip(keys, closed, strict=True):
        results = tuple(sorted(returned[key]))
        if key not in graphs:
            graphs[key] = _graph(part, results)
        segments.append(Segment(graphs[key], _inputs(part), tuple(part[at] for at in results), (key, results)))
    return segments


def _units(trace: Graph) -> list[list[Node]]:
    """Operations except views, each with the parts of its result if it has several."""
    units = []
    for node in trace.nodes:
        if node.op == "call_function" and not _is_view(node) and node.target is not operator.getitem:
            units.append([node, *(user for user in node.users if user.target is operator.getitem)])
    return units


def _is_view(node: Node) -> bool:
    """Whether an operation's result shares the memory of its first argument."""
    schema = schema_of(node.target)
    returns: Sequence[Any] = schema.returns if schema is not None else ()
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _with_views(part: Sequence[Node], place: dict[Node, int]) -> list[Node]:
    """A part's operations, each after the views that it reads."""
    closed: dict[Node, None] = {}

    def add(node: Node) -> None:
        for arg in node.all_input_nodes:
            if arg.op == "call_function" and arg not in place and arg not in closed:
                add(arg)
        closed[node] = None

    for node in part:
        add(node)
    return list(closed)


def _outside(part: Sequence[Node]) -> list[Node]:
    members = set(part)
    return [arg for node in part for arg in node.all_input_nodes if arg not in members]


def _cuts(units: Sequence[Sequence[Node]]) -> list[int]:
    """The boundaries of segments among the units."""
    kinds: dict[Hashable, int] = {}
    numbers = [kinds.setdefault(_kind(unit[0]), len(kinds)) for unit in units]
    codes = torch.tensor(numbers, device="cpu")
    length, period, start = 0, 0, 0
    for shift in range(LEAST_PERIOD, len(units) // LEAST_REPEATS + 1):
        begin, run = _longest_run(codes[:-shift] == codes[shift:])
        if run > length:
            length, period, start = run, shift, begin
    repeats = length // period + 1 if period else 0
    if repeats < LEAST_REPEATS:
        return _cuts_at_an_operation(units, numbers)
    return sorted({0, len(units), *(start + period * turn for turn in range(repeats + 1))})


def _cuts_at_an_operation(units: Sequence[Sequence[Node]], kinds: Sequence[int]) -> list[int]:
    """Boundaries before each call of the operation that leaves the fewest units to compile, if at most half of them."""
    best, fewest = [0, len(units)], len(units) // 2
    targets = [unit[0].target for unit in units]
    for target in dict.fromkeys(targets):
        calls = [at for at, other in enumerate(targets) if other == target]
        if len(calls) < LEAST_REPEATS or len(units) < LEAST_PERIOD * len(calls):
            continue
        cuts = sorted({0, len(units), *calls})
        left = sum(map(len, {tuple(kinds[start:end]) for start, end in pairwise(cuts)}))
        if left <= fewest:
            best, fewest = cuts, left
    return best


def _longest_run(same: Tensor) -> tuple[int, int]:
    """The start and length of the longest run of True."""
    edges = torch.diff(torch.nn.functional.pad(same.to(torch.int8), (1, 1)))
    starts, ends = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    if not len(starts):
        return 0, 0
    at = int((ends - starts).argmax())
    return int(starts[at]), int(ends[at] - starts[at])


def _kind(node: Node) -> Hashable:
    """A key for an operation, regardless of the values that it reads."""
    return (node.target, repr(map_arg((node.args, node.kwargs), lambda arg: _shape(arg))))


def _shape(node: Node) -> str:
    value = value_of(node)
    if value is None:
        return "tensors"
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"


def _key(part: Sequence[Node]) -> Hashable:
    """A key for a part's operations, shapes and wiring; outside values are numbered by their first use."""
    inside = {node: f"%{at}" for at, node in enumerate(part)}
    names: dict[Hashable, str] = {}

    def name(node: Node) -> str:
        if node in inside:
            return inside[node]
        return names.setdefault(_identity(node), f"<{len(names)}: {_shape(node)}>")

    return tuple((node.target, repr(map_arg((node.args, node.kwargs), name))) for node in part)


def _identity(node: Node) -> Hashable:
    """The value of a node: a constant has a node for each use."""
    return node.target if node.op == "get_attr" else node


def _inputs(part: Sequence[Node]) -> tuple[Node, ...]:
    """The values that a part reads from outside, in the order of their first use."""
    inputs: dict[Hashable, Node] = {}
    for arg in _outside(part):
        inputs.setdefault(_identity(arg), arg)
    return tuple(inputs.values())


def _graph(part: Sequence[Node], returned: Sequence[int]) -> Graph:
    graph = Graph()
    inputs = {_identity(arg): graph.placeholder(f"input_{at}") for at, arg in enumerate(_inputs(part))}
    inside: dict[Node, Node] = {}
    for node in part:
        inside[node] = graph.node_copy(node, lambda arg: inside[arg] if arg in inside else inputs[_identity(arg)])
    graph.output([inside[part[at]] for at in returned])
    return graph
