"""Memory that a process has freed and its C library keeps."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Give back to the system what was freed, where the GNU C library can; takes some milliseconds.

    That library keeps what a pass over a prompt has freed, and can't use all of it again: a few times what is in use at
    a time, for as long as the process lives.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
