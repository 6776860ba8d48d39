"""A step's segments, called one after another: by C++ the same tensors as by Python."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from hf_specdec.prepared import code_on_disk, compiled_step, program
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


def _runs(compiled: CompiledStep, *given: Tensor) -> Any:
    return compiled(*given), compiled(*given)


def test_cpp_returns_what_python_does(weights: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    x, written = torch.randn(2, 4, dtype=torch.float64), torch.zeros(8, 4, dtype=torch.float64)
    by_cpp, segments, make = [], [], program._by_cpp

    def noted(calls: Any, *others: Any) -> Any:
        segments.append(calls)
        by_cpp.append(make(calls, *others))
        return by_cpp[-1]

    monkeypatch.setattr(program, "_by_cpp", noted)
    first, second = _runs(CompiledStep(_step(weights, written), CPU, "step"), x, x)
    assert by_cpp[0] is not None, "called by C++"
    assert len(segments[0]) >= len(weights), "of each layer"
    in_cpp = written.clone()
    expected = _step(weights, written)(x, x)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-12)
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(in_cpp, written, rtol=0, atol=1e-12)
    # The negative control: weights are read at each call.
    compiled = CompiledStep(_step(weights, written), CPU, "step")
    before = _runs(compiled, x, x)[1]
    weights[3].mul_(2)
    assert not torch.equal(compiled(x, x)[0], before[0])
    torch.testing.assert_close(compiled(x, x), _step(weights, written)(x, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("lacking", ["libraries", "function"])
def test_without_what_it_takes_python_goes_on(
    lacking: str, weights: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "libraries":
        monkeypatch.setattr(code_on_disk, "library_for", lambda what: None)
    else:
        monkeypatch.setattr(code_on_disk, "function_in", lambda library: None)
    monkeypatch.setattr(program, "_runner", lambda: pytest.fail("called by C++"))
    x, written = torch.randn(2, 4, dtype=torch.float64), torch.zeros(8, 4, dtype=torch.float64)
    first, second = _runs(CompiledStep(_step(weights, written), CPU, "step"), x, x)
    assert all(map(torch.equal, first, second))


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
    _runs(compiled, good)
    with pytest.raises(RuntimeError, match="index"):
        compiled(bad)
    torch.testing.assert_close(compiled(good), table[good] + 1)


def test_cpp_lets_go_of_constants_with_the_step() -> None:
    constant = torch.randn(2, 4, dtype=torch.float64)
    before = constant._use_count()
    compiled = CompiledStep(lambda x: (x * constant).sum(0), CPU, "step")
    _runs(compiled, torch.randn(2, 4, dtype=torch.float64))
    assert constant._use_count() > before, "the negative control: C++ holds it"
    del compiled
    gc.collect()
    assert constant._use_count() == before
