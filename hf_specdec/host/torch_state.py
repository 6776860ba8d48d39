"""Restores torch's state in a thread after an interrupted call.

Ctrl-C may arrive while a mode of torch is being entered or left, which leaves it half on. This is repaired in one
one place, around the whole call.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import torch
from torch.overrides import TorchFunctionMode

from hf_specdec.compat.torch_private import (
    DISPATCH_MODES,
    FUNCTION_MODES,
    dispatch_flags,
    optimizes_graphs,
    set_dispatch_flags,
    set_optimizes_graphs,
)

_Mode = TypeVar("_Mode", bound="FunctionMode")
# torch sets inference mode in blocks only, which would restore the state that the interrupt left.
_unended: list[torch.inference_mode] = []


class FunctionMode(TorchFunctionMode):
    """A `TorchFunctionMode` that ends without an error, whatever an interrupt has done to the stack of modes.

    torch's own pops the innermost mode, and on an empty stack raises a `RuntimeError` in place of the
    `KeyboardInterrupt`.
    """

    def __enter__(self: _Mode) -> _Mode:
        self._around = FUNCTION_MODES.modes()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        FUNCTION_MODES.restore(self._around)


class KeptTorchState:
    """A context manager that restores torch's state in this thread if an exception is raised in it."""

    def __enter__(self) -> None:
        self._function_modes, self._dispatch_modes = FUNCTION_MODES.modes(), DISPATCH_MODES.modes()
        self._flags, self._optimizes = dispatch_flags(), optimizes_graphs()
        self._gradients, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        _end_contexts(error)
        if torch.is_inference_mode_enabled() != self._inference:
            _unended.append(torch.inference_mode(self._inference))
            _unended[-1].__enter__()
        FUNCTION_MODES.restore(self._function_modes)
        DISPATCH_MODES.restore(self._dispatch_modes)
        set_dispatch_flags(self._flags)
        set_optimizes_graphs(self._optimizes)
        torch.set_grad_enabled(self._gradients)


def _end_contexts(error: BaseException | None) -> None:
    """End contexts such as `inference_mode` that were interrupted while being entered or left.

    The traceback keeps them alive; otherwise they would end, and change torch's state, when it is freed.
    """
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_name in ("__enter__", "__exit__"):
                with suppress(RuntimeError):  # it is still running
                    trace.tb_frame.clear()
            trace = trace.tb_next
        error = error.__context__
