"""CUDA graphs stood in for on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.node import map_arg

from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.compiled_step import Step, _filled, _leaves, _structure
from hf_specdec.prepared.step_trace import trace, value_of


class StandIn:
    """A captured step: the first call captures, and every call replays what was captured, over the same memory.

    Only operations are replayed, on the tensors of the first call. A replay overwrites the step's results, and spoils
    those of graphs that were captured later in the same pool, since their memory is shared.

    Attributes:
        replays: how often it was replayed.
    """

    def __init__(self, step: Step, pool: list[StandIn]) -> None:
        self._step, self._pool = step, pool
        self._graph: Graph | None = None
        self.replays = 0

    def __call__(self, *args: Any) -> Any:
        given = _leaves(args)
        if self._graph is None:
            self._capture(given, args)
        assert all(one is known for one, known in zip(given, self._given, strict=True)), "other tensors than captured"
        for later in self._pool[self._pool.index(self) + 1 :]:
            for one in later._results:
                one.fill_(torch.nan if one.is_floating_point() else -1)
        for one, new in zip(self._results, _replayed(self._graph, self._given), strict=True):
            one.copy_(new)
        self.replays += 1
        return self._returned

    def _capture(self, given: list[Tensor], args: Any) -> None:
        for _ in range(2):
            returned = self._step(*args)
        shape = _structure(args)
        self._graph = trace(lambda *leaves: _leaves(self._step(*_filled(shape, iter(leaves)))), *given)
        self._given, self._results = given, [one.clone() for one in _leaves(returned)]
        self._returned = _filled(_structure(returned), iter(self._results))
        self._pool.append(self)


def _replayed(graph: Graph, given: list[Tensor]) -> list[Tensor]:
    values: dict[Any, Any] = {}
    inputs = iter(given)
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = value_of(node)
        else:
            arguments, named = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*arguments, **named)
    return [values[one] for one in node.args[0]]


def capture_steps(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Capture prepared steps for the rest of a test, as on CUDA; lists them."""
    captured: list[StandIn] = []
    prepare = cuda_graphs.prepare

    def prepare_and_capture(*args: Any, pool: Any, **named: Any) -> StandIn:
        captured.append(StandIn(prepare(*args, pool=pool, **named), pool))
        return captured[-1]

    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "new_pool", lambda device: [])
    monkeypatch.setattr(cuda_graphs, "prepare", prepare_and_capture)
    return captured
