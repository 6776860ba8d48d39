"""A step's segments, called one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from hf_specdec.prepared import compiled_step
from hf_specdec.prepared.compiled_step import CompiledStep

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("own_steps")]

CPU = torch.device("cpu")


@pytest.fixture
def weights() -> list[Tensor]:
    """Of enough layers that each is a segment."""
    return list(torch.randn(8, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def _step(weights: list[Tensor], written: Tensor) -> Any:
    def step(x: Tensor, unread: Tensor) -> tuple[Tensor, Tensor]:
        for at, weight in enumerate(weights):
            x = torch.sigmoid(torch.tanh(x @ weight + 1) * 2 - x.sin()).cos() + torch.relu(x) / 3
            written[at].copy_(x[0])
        return x, x + 1

    return step


def test_a_step_returns_what_its_function_does(weights: list[Tensor]) -> None:
    x, written = torch.randn(2, 4, dtype=torch.float64), torch.zeros(8, 4, dtype=torch.float64)
    compiled = CompiledStep(_step(weights, written), CPU, "step")
    before = compiled(x, x)
    in_code = written.clone()
    torch.testing.assert_close(before, _step(weights, written)(x, x), rtol=0, atol=1e-12)
    torch.testing.assert_close(in_code, written, rtol=0, atol=1e-12)
    # The negative control: weights are read at each call.
    weights[3].mul_(2)
    assert not torch.equal(compiled(x, x)[0], before[0])
    torch.testing.assert_close(compiled(x, x), _step(weights, written)(x, x), rtol=0, atol=1e-12)


def test_code_calls_kernels_without_the_dispatcher(weights: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """And through it, to the same result, where inductor can't call C functions."""
    x, results, what = torch.randn(2, 4, dtype=torch.float64), [], compiled_step._what
    for directly in (True, False):
        if not directly:
            monkeypatch.setattr(compiled_step.inductor, "calling", lambda functions: {})
            monkeypatch.setattr(compiled_step, "_what", lambda *about: (what(*about), "through the dispatcher"))
            compiled_step._codes.clear()
        compiled = CompiledStep(lambda x: linear(x, weights[0]) + 1, CPU, "step")
        compiled(x)
        with torch.profiler.profile() as seen:
            results.append(compiled(x))
        assert directly != ("hf_specdec::linear_double" in {event.name for event in seen.events()})
    assert torch.equal(*results)


def test_errors_in_code_are_raised(weights: list[Tensor]) -> None:
    table = torch.randn(3, 4, dtype=torch.float64)
    compiled = CompiledStep(lambda at: table.index_select(0, at) + 1, CPU, "step")
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 7])
    compiled(good)
    with pytest.raises(RuntimeError, match="index"):
        compiled(bad)
    torch.testing.assert_close(compiled(good), table[good] + 1)
