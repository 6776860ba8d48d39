"""Compiled rounds without a compiler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from hf_specdec.prepared import compiled_step
from hf_specdec.prepared.repeated_blocks import Segment


def interpret_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what inductor would compile operation by operation, for the rest of a test."""
    monkeypatch.setattr(compiled_step, "compile_refusal", lambda device: None)
    monkeypatch.setattr(compiled_step, "_codes", OrderedDict())
    monkeypatch.setattr(compiled_step, "supported", lambda: False)
    monkeypatch.setattr(compiled_step, "_compile", _interpreted)


def _interpreted(segment: Segment, device: torch.device) -> Callable[[list[Any]], Any]:
    """In place of inductor's code."""
    module = GraphModule({}, segment.graph)

    def code(inputs: list[Any]) -> Any:
        found = module(*inputs)
        inputs.clear()
        return found

    return code
