"""TorchScript traces: made without warnings, freed with the last reference, run without torch's optimizer."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.compat.torch_private import can_trace, recorded

_tracing = threading.local()


@dataclass(frozen=True)
class Trace:
    """A traced function of tensors.

    Args:
        function: the compiled function.
        calls: traces that it calls, which torch does not keep alive.
    """

    function: torch.jit.ScriptFunction
    calls: tuple[Trace, ...] = ()


def traced(step: Callable[..., Any], inputs: Sequence[Tensor], calls: Sequence[Trace] = ()) -> Trace | None:
    """Trace a function of tensors, which may replay the traces in `calls`; None if torch cannot trace it."""
    if not can_trace():
        return None
    warnings.filterwarnings("ignore", category=_WhileTracing)
    _tracing.active = True
    try:
        function = recorded(step, inputs)
    finally:
        _tracing.active = False
    return Trace(function, tuple(calls))


def replay(made: Trace, inputs: Sequence[Tensor]) -> Any:
    """Run a trace and return its result."""
    # The optimizer takes as long as tracing and gains nothing.
    with torch.jit.optimized_execution(False):
        return made.function(*inputs)


class _InTracingThread(type):
    def __subclasscheck__(cls, category: type) -> bool:
        return getattr(_tracing, "active", False)


class _WhileTracing(Warning, metaclass=_InTracingThread):
    """Matches every warning of a tracing thread, such as that tracing is deprecated or fixes shapes.

    `warnings.catch_warnings` would change the filters of all threads.
    """
