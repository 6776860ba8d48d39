"""Returns memory to the system that a process has freed and its C library keeps."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Return freed memory to the system, if the GNU C library is used; takes some milliseconds.

    Otherwise that library keeps the memory that a pass over a prompt has freed, and cannot reuse all of it: it grows to
    a few times what is in use, for the life of the process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
