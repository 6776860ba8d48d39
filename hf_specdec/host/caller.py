"""Warnings that name the line of the caller."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

# Code between the caller's line and ours in the stack.
_LIBRARIES = ("hf_specdec", "transformers", "torch", "peft", "contextlib")


def warn_caller(message: str) -> None:
    """Warn at the line, outside this package and the libraries that call it, from which `generate` was called."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    # `skip_file_prefixes` does the same from Python 3.12 on.
    warnings.warn(message, stacklevel=level)
