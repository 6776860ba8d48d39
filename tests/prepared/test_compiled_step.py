"""Compiled steps: compiled once, run without the step, reading weights and arguments as they are at each call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from transformers.utils import logging

from hf_specdec.prepared import compiled_step
from hf_specdec.prepared.compile_progress import tqdm_disabled
from hf_specdec.prepared.compiled_step import CompiledStep

CPU = torch.device("cpu")


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
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
    assert [float(result[0]) for result in results] == [1.0, 2.0]
    assert len(segments) == 1


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
def test_progress_names_the_step_and_counts_its_segments(
    segments: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_what_is_compiled_already_shows_no_progress(segments: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for expected in (True, False):
        CompiledStep(Step(), CPU, "draft step")((torch.ones(3),), torch.ones(3))
        assert bool(capsys.readouterr().err) == expected


@pytest.mark.compiles
def test_what_all_steps_share_is_compiled_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
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
