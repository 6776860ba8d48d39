"""Pieces as pointers: the same numbers, and a tensor all the same for what a library's call reads or writes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code

from hf_specdec.prepared import compiled_step
from hf_specdec.prepared.compiled_step import Compiled

CPU = torch.device("cpu")


def _sums(states: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([(row * weight).sum(dim=-1) for row in states.unbind(0)])


def _loops_only(states: Tensor, weight: Tensor) -> Tensor:
    return _sums(states, weight).tanh()


def _read_by_a_library(states: Tensor, weight: Tensor) -> Tensor:
    """Its pieces: a sum that a library's cumulative sum reads, and what that writes."""
    first = (states[0] * weight).sum(dim=-1)
    second = first.cumsum(dim=0)
    return torch.stack([first, second, (states[1] * weight).sum(dim=-1)])


def _run(step, pointers: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], str]:
    if not pointers:
        monkeypatch.setattr(compiled_step, "pieces_as_pointers", nullcontext)
    torch._dynamo.reset()
    states, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    with fresh_cache():
        run = Compiled(step, CPU)
        result, code = run_and_get_code(run, states, weight)
    again = run(states + 2, weight)
    torch._dynamo.reset()
    torch.testing.assert_close(result, step(states, weight))
    torch.testing.assert_close(again, step(states + 2, weight))
    return [result, again], "".join(code)


def test_what_loops_write_and_read_is_no_tensor_and_holds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found, code = _run(_loops_only, True, monkeypatch)
    as_tensors, before = _run(_loops_only, False, monkeypatch)
    assert "alias" in before and "alias" not in code and "struct {" in code
    assert all(torch.equal(one, other) for one, other in zip(found, as_tensors, strict=True))


def test_what_a_library_reads_stays_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    _, code = _run(_read_by_a_library, True, monkeypatch)
    assert "alias" in code
