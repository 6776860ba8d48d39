"""A trace cut into segments is the same function, and a model's layers are one segment."""

from collections.abc import Collection

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from hf_specdec.prepared.repeated_blocks import LEAST_REPEATS, segments_of
from hf_specdec.prepared.step_trace import trace, value_of

LAYERS = LEAST_REPEATS + 2
IRREGULAR = (0, 1, 4, 7, 9, 10, 14)  # of 2 * LAYERS


class Layers:
    """Layers that write to caches of their own, read through views, and end in a result of several tensors."""

    def __init__(self, count: int = LAYERS, odd: Collection[int] = ()) -> None:
        draw = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(4, 4, generator=draw) for _ in range(count)]
        self.caches = [torch.zeros(6, 4) for _ in range(count)]
        self.odd = odd

    def __call__(self, states: Tensor, slot: Tensor) -> list[Tensor]:
        states = states.t().contiguous()
        mask = (slot + 1).float()
        for at, (weight, cache) in enumerate(zip(self.weights, self.caches, strict=True)):
            mixed = torch.mm(states, weight)
            cache[:4].index_copy_(0, slot, mixed[:1])
            read = cache[:4] * mask
            states = torch.tanh(read + states).exp().log() * 0.5 + mixed.sum(dim=0, keepdim=True)
            if at in self.odd:
                states = states.sin()
        best, where = states.max(dim=1)
        return [best.clone(), where + 1]


def _run(graph: Graph, *args: Tensor) -> list[Tensor]:
    """A trace by its segments."""
    values = dict(zip((node for node in graph.nodes if node.op == "placeholder"), args, strict=True))
    for segment in segments_of(graph):
        given = [value_of(node) if node.op == "get_attr" else values[node] for node in segment.inputs]
        values |= zip(segment.outputs, GraphModule({}, segment.graph)(*given), strict=True)
    return [values[node] for node in graph.output_node().args[0]]


def _trace(layers: Layers) -> tuple[Graph, tuple[Tensor, Tensor]]:
    args = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([2])
    return trace(layers, *args), args


@pytest.mark.parametrize(
    ("count", "odd"),
    [(LAYERS, ()), (LAYERS, (LAYERS - 1,)), (2 * LAYERS, IRREGULAR)],
    ids=["alike", "one unlike the others", "two kinds"],
)
def test_segments_compute_what_the_step_does(count: int, odd: Collection[int]) -> None:
    layers = Layers(count, odd)
    graph, args = _trace(layers)
    for cache in layers.caches:
        cache.zero_()
    found = _run(graph, *args)
    written = [cache.clone() for cache in layers.caches]
    for cache in layers.caches:
        cache.zero_()
    assert all(torch.equal(one, other) for one, other in zip(found, layers(*args), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(written, layers.caches, strict=True))
    assert written[-1].any()


def test_layers_are_one_segment_however_many_there_are() -> None:
    counts = [len({segment.key for segment in segments_of(_trace(Layers(n))[0])}) for n in (LAYERS, 3 * LAYERS)]
    assert counts[0] == counts[1] <= 3


def test_layers_of_two_kinds_are_a_few_segments() -> None:
    segments = segments_of(_trace(Layers(2 * LAYERS, IRREGULAR))[0])
    assert len(segments) > 2 * LAYERS
    assert len({segment.key for segment in segments}) <= 4  # two of layers, one before and one after


def test_layers_that_all_differ_are_not_cut() -> None:
    layers = Layers(2 * LAYERS)
    layers.weights = [torch.randn(4, 4 + at) for at in range(2 * LAYERS)]

    def step(states: Tensor) -> list[Tensor]:
        for weight in layers.weights:
            states = torch.tanh(torch.mm(states, weight) @ weight.t()).exp().log() * 0.5 + states
        return [states]

    assert len(segments_of(trace(step, torch.ones(4, 4)))) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_few_layers_are_not_cut(count: int) -> None:
    assert len(segments_of(_trace(Layers(count))[0])) == 1


def test_keys_tell_shapes_constants_and_wiring_apart() -> None:
    def key(step, *args):
        (segment,) = segments_of(trace(step, *args))
        return segment.key

    one, two = torch.ones(3), torch.ones(3)
    base = key(lambda a, b: [a * 2 + b], one, two)
    assert base == key(lambda a, b: [a * 2 + b], one + 1, two)
    assert base != key(lambda a, b: [a * 3 + b], one, two)
    assert base != key(lambda a, b: [a * 2 + a], one, two)
    assert base != key(lambda a, b: [a * 2 + b], torch.ones(4), torch.ones(4))
    assert base != key(lambda a, b: [a * 2 + b], one.double(), two.double())
