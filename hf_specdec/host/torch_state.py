"""torch's state in a thread, which is after an interrupted call as it was before.

Ctrl-C may come while a mode of torch begins or ends, which is then neither on nor off. What it leaves is put right in
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
# torch switches inference mode in blocks only; at the end of these it would be as an interrupt has left it.
_unended: list[torch.inference_mode] = []


class FunctionMode(TorchFunctionMode):
    """A `TorchFunctionMode` that ends without an error, whatever an interrupt has done to the stack of modes.

    torch's own takes the innermost mode off the stack, and if there is none raises a `RuntimeError` in place of the
    `KeyboardInterrupt`.
    """

    def __enter__(self: _Mode) -> _Mode:
        self._around = FUNCTION_MODES.modes()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        FUNCTION_MODES.restore(self._around)


class KeptTorchState:
    """A block after which, if anything was raised in it, torch's state in this thread is as before."""

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
    """End the contexts that were interrupted while they began or ended, such as `inference_mode`.

    The traceback keeps them, so that otherwise they would end, and change torch's state, when it is freed.
    """
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_name in ("__enter__", "__exit__"):
                with suppress(RuntimeError):  # it is still running
                    trace.tb_frame.clear()
            trace = trace.tb_next
        error = error.__context__
