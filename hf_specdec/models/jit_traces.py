"""TorchScript traces: made without warnings, freed with the last reference to them, run without torch's optimizer."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_tracing = threading.local()


@dataclass(frozen=True)
class Trace:
    """A traced function of tensors.

    Args:
        function: runs it.
        calls: traces that it calls, which torch does not keep alive.
    """

    function: torch.jit.ScriptFunction
    calls: tuple[Trace, ...] = ()


def traced(step: Callable[..., Any], inputs: Sequence[Tensor], calls: Sequence[Trace] = ()) -> Trace | None:
    """The trace of a function of tensors, which may replay the traces in `calls`; None where torch makes none.

    `torch.jit.trace` would register the function with the process, which keeps it for good, its Python lines included.
    """
    if not (can_trace() and torch.jit._state._enabled):  # PYTORCH_JIT=0
        return None
    warnings.filterwarnings("ignore", category=_WhileTracing)
    _tracing.active = True
    try:
        graph, _ = torch._C._create_graph_by_tracing(step, tuple(inputs), lambda value: "", True, False)
    finally:
        _tracing.active = False
    return Trace(torch._C._create_function_from_graph("step", graph), tuple(calls))


def can_trace() -> bool:
    """Whether this build of torch has what tracing takes; `torch.jit.trace` calls the same."""
    return all(hasattr(torch._C, name) for name in ("_create_graph_by_tracing", "_create_function_from_graph"))


def replay(made: Trace, inputs: Sequence[Tensor]) -> Any:
    """The result of a trace."""
    # The optimizer takes as long as tracing and gains nothing.
    with torch.jit.optimized_execution(False):
        return made.function(*inputs)


class _InTracingThread(type):
    def __subclasscheck__(cls, category: type) -> bool:
        return getattr(_tracing, "active", False)


class _WhileTracing(Warning, metaclass=_InTracingThread):
    """Every warning of a thread that is tracing: that tracing is deprecated, and that it fixes shapes.

    `warnings.catch_warnings` would change the filters of all threads.
    """
