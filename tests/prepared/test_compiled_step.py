"""Compiled steps: compiled once, run without the step, reading weights and arguments as they are at each call."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import linear
from transformers.utils import logging

from hf_specdec.prepared import compiled_step
from hf_specdec.prepared.compile_progress import tqdm_disabled
from hf_specdec.prepared.compiled_step import CompiledStep

CPU = torch.device("cpu")


@pytest.fixture
def segments(monkeypatch) -> Iterator[list[Any]]:
    """Segments run as they are, without inductor; one entry for each that is compiled."""
    compiled: list[Any] = []

    def compile(segment: Any, device: torch.device) -> Any:
        compiled.append(segment.key)
        function = GraphModule({}, segment.graph)
        return lambda inputs: function(*inputs)

    monkeypatch.setattr(compiled_step, "_compile", compile)
    monkeypatch.setattr(compiled_step, "supported", lambda: False)
    compiled_step._codes.clear()
    yield compiled
    compiled_step._codes.clear()


class Step:
    """Like a round's: weights and a buffer of its own, arguments and results in structures."""

    def __init__(self) -> None:
        self.weight, self.written, self.runs = torch.eye(3), torch.zeros(3), 0

    def __call__(self, pair: tuple[Tensor, ...], third: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        self.runs += 1
        (first,) = pair
        self.written.copy_(first)
        return (first @ self.weight + third,), first


def test_every_call_reads_its_own_arguments_and_the_weights_as_they_are(segments: list[Any]) -> None:
    step = Step()
    run = CompiledStep(step, CPU, "step")
    for number in range(4):
        first, third = torch.full((3,), float(number)), torch.arange(3.0) + number
        (result,), same = run((first,), third)
        assert torch.equal(result, first @ step.weight + third)
        assert torch.equal(same, first) and torch.equal(step.written, first)
        step.weight += 1
    assert len(segments) == 1


def test_later_calls_do_not_run_the_step(segments: list[Any]) -> None:
    step = Step()
    run = CompiledStep(step, CPU, "step")
    run((torch.ones(3),), torch.ones(3))
    runs = step.runs
    step.weight = torch.zeros(3, 3)  # whoever keeps the step has to see this; the compiled step doesn't
    (result,), _ = run((torch.ones(3),), torch.ones(3))
    assert torch.equal(result, torch.full((3,), 2.0)) and step.runs == runs


def test_a_step_compiled_ahead_is_not_compiled_again_for_arguments_of_that_form(segments: list[Any]) -> None:
    step = Step()
    run = CompiledStep(step, CPU, "step")
    run.compile((torch.ones(3),), torch.ones(3))
    (result,), _ = run((torch.full((3,), 2.0),), torch.zeros(3))
    assert torch.equal(result, torch.full((3,), 2.0)) and step.runs == 1 and len(segments) == 1


def test_a_step_compiled_ahead_for_another_form_is_compiled_for_its_first_call(segments: list[Any]) -> None:
    step = Step()
    run = CompiledStep(step, CPU, "step")
    run.compile((torch.ones(3),), torch.ones(3))
    (result,), _ = run((torch.ones(3),), torch.ones(2, 3))
    assert result.shape == (2, 3) and step.runs == len(segments) == 2


def test_steps_of_equal_operations_share_their_code_but_not_their_weights(segments: list[Any]) -> None:
    one, other = Step(), Step()
    other.weight = 2 * torch.eye(3)
    results = [CompiledStep(step, CPU, "step")((torch.ones(3),), torch.zeros(3))[0][0] for step in (one, other)]
    assert [float(result[0]) for result in results] == [1.0, 2.0] and len(segments) == 1


def test_a_result_is_never_a_view_of_an_argument(segments: list[Any]) -> None:
    given = torch.arange(4.0)
    run = CompiledStep(lambda states: (states[1:], states + 1), CPU, "step")
    view, _ = run(given)
    given.zero_()
    assert torch.equal(view, torch.tensor([1.0, 2.0, 3.0]))


@pytest.fixture
def bars() -> None:
    """transformers' progress bars, which other tests of this process may have switched off."""
    logging.enable_progress_bar()


@pytest.mark.usefixtures("bars")
def test_progress_names_the_step_and_counts_its_segments(segments: list[Any], capsys) -> None:
    def compile(disable: bool) -> str:
        compiled_step._codes.clear()
        with tqdm_disabled(disable):
            CompiledStep(Step(), CPU, "draft step")((torch.ones(3),), torch.ones(3))
        return capsys.readouterr().err

    assert "Compiling draft step" in (shown := compile(False)) and "1/1" in shown
    assert compile(True) == ""
    logging.disable_progress_bar()
    try:
        assert compile(False) == ""
    finally:
        logging.enable_progress_bar()


@pytest.mark.usefixtures("bars")
def test_what_is_compiled_already_shows_no_progress(segments: list[Any], capsys) -> None:
    for expected in (True, False):
        CompiledStep(Step(), CPU, "draft step")((torch.ones(3),), torch.ones(3))
        assert bool(capsys.readouterr().err) == expected


@pytest.mark.compiles
def test_what_all_steps_share_is_compiled_again_after_a_failure(monkeypatch) -> None:
    """Its compiler may have been interrupted."""
    begun: list[int] = []

    def compile() -> None:
        begun.append(1)
        if len(begun) == 1:
            raise KeyError

    monkeypatch.setattr(compiled_step, "_begun", cache(compiled_step._begun.__wrapped__))
    monkeypatch.setattr(compiled_step, "_compile_any", compile)
    with pytest.raises(KeyError):
        compiled_step._begun().result()
    for _ in range(2):
        compiled_step._inductor().result()
    assert len(begun) == 2


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


@pytest.mark.compiles
@pytest.mark.usefixtures("own_steps")
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


@pytest.mark.compiles
@pytest.mark.usefixtures("own_steps")
def test_code_calls_kernels_without_the_dispatcher(weights: list[Tensor], monkeypatch) -> None:
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


@pytest.mark.compiles
@pytest.mark.usefixtures("own_steps")
def test_errors_in_code_are_raised(weights: list[Tensor]) -> None:
    table = torch.randn(3, 4, dtype=torch.float64)
    compiled = CompiledStep(lambda at: table.index_select(0, at) + 1, CPU, "step")
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 7])
    compiled(good)
    with pytest.raises(RuntimeError, match="index"):
        compiled(bad)
    torch.testing.assert_close(compiled(good), table[good] + 1)
