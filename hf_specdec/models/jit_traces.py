"""TorchScript traces: made without warnings, kept without what torch leaves behind, run without its optimizer."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

MAX_TRACES = 512  # ever made by a process, since torch never frees a trace

_traces = count(1)
_tracing = threading.local()


def traced(step: Callable[..., Any], inputs: Sequence[Tensor]) -> torch.jit.ScriptFunction | None:
    """The trace of a function of tensors; None where torch makes none, or a process has `MAX_TRACES`."""
    if next(_traces) > MAX_TRACES:
        return None
    warnings.filterwarnings("ignore", category=_WhileTracing)
    _tracing.active = True
    try:
        made: Any = torch.jit.trace(step, tuple(inputs), check_trace=False)
    finally:
        _tracing.active = False
    if not isinstance(made, torch.jit.ScriptFunction):  # PYTORCH_JIT=0: the step itself, which reads this call's cache
        return None
    vars(made).pop("_torchdynamo_inline", None)  # the step, which holds the model
    return made


def replay(made: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """The result of a trace."""
    # The optimizer takes as long as tracing and gains nothing.
    with torch.jit.optimized_execution(False):
        return made(*inputs)


class _InTracingThread(type):
    def __subclasscheck__(cls, category: type) -> bool:
        return getattr(_tracing, "active", False)


class _WhileTracing(Warning, metaclass=_InTracingThread):
    """Every warning of a thread that is tracing: that tracing is deprecated, and that it fixes shapes.

    `warnings.catch_warnings` would change the filters of all threads.
    """
