"""Compiled steps: inductor's code is called with the arguments of each call, and reads what they and weights hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_specdec.prepared.compiled_step import Compiled

CPU = torch.device("cpu")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Graphs run as they are, without inductor; one entry, the count of its inputs, for every run."""
    import torch._inductor.compile_fx as inductor

    runs: list[int] = []

    class Code:
        _boxed_call = True

        def __init__(self, graph: Callable[..., Any], inputs: Any, **options: Any) -> None:
            self.graph, self.current_callable = graph, self.run

        def run(self, inputs: list[Any]) -> Any:
            given = list(inputs)
            inputs.clear()  # as inductor's code does
            runs.append(len(given))
            return self.graph(*given)

        def __call__(self, inputs: list[Any]) -> Any:
            return self.current_callable(inputs)

    monkeypatch.setattr(inductor, "compile_fx_inner", Code)
    torch._dynamo.reset()
    yield runs
    torch._dynamo.reset()


class Step:
    """Like a round's: weights and a buffer of its own, arguments in a structure, a result with None in it."""

    def __init__(self) -> None:
        self.weight, self.written, self.traced = torch.eye(3), torch.zeros(3), 0

    def __call__(self, pair: tuple[Tensor, Tensor | None], third: Tensor) -> tuple[tuple[Tensor, None], Tensor]:
        self.traced += 1
        first, second = pair
        assert second is None
        self.written.copy_(first)
        return (first @ self.weight + third, None), third * 2


def test_every_call_is_of_its_own_arguments_and_of_the_weights_as_they_are(graphs: list[int]) -> None:
    step = Step()
    run = Compiled(step, CPU)
    for number in range(4):
        first, third = torch.full((3,), float(number)), torch.arange(3.0) + number
        (result, nothing), doubled = run((first, None), third)
        assert torch.equal(result, first @ step.weight + third) and nothing is None
        assert torch.equal(doubled, third * 2) and torch.equal(step.written, first)
        step.weight += 1
    assert len(graphs) == 4 and len(set(graphs)) == 1


def test_later_calls_run_none_of_the_step_s_python(graphs: list[int]) -> None:
    step = Step()
    run = Compiled(step, CPU)
    run((torch.ones(3), None), torch.ones(3))
    seen = step.traced
    step.weight = torch.zeros(3, 3)  # whoever keeps the step has to see this; the step doesn't
    (result, _), _ = run((torch.ones(3), None), torch.ones(3))
    assert torch.equal(result, torch.full((3,), 2.0)) and step.traced == seen


def test_a_result_that_the_graph_does_not_return_comes_all_the_same(graphs: list[int]) -> None:
    run = Compiled(lambda a: (a + 1, a, 7), CPU)
    for number in range(3):
        given = torch.full((2,), float(number))
        added, same, seven = run(given)
        assert torch.equal(added, given + 1) and same is given and seven == 7


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_products_become_loops_on_a_cpu_only(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator libraries of products are as they should be."""
    import torch._inductor.compile_fx as inductor

    seen: list[bool] = []

    def compile_fx(graph, inputs, inner, config_patches):
        seen.append(any(node.target is torch.nn.functional.linear for node in graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    torch._dynamo.reset()
    weight = torch.ones(3, 3)
    Compiled(lambda states: torch.nn.functional.linear(states, weight), torch.device(device))(torch.ones(1, 3))
    assert seen == [device != "cpu"]
