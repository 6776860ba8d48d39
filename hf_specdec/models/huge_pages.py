"""Weights in huge pages: reading them all in every pass looks up 512 times fewer addresses.

Linux only, and only for memory of the process's own; weights mapped from a file may stay where they are.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

PAGE_BYTES = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1


def use_huge_pages(model: nn.Module) -> int:
    """Ask the kernel to move a model's weights on the CPU into huge pages; their addresses and values stay.

    Moving takes about a second per few gigabytes, no memory besides, and nothing the second time. Pages shared with a
    forked process become this process's own.

    Returns:
        How many bytes now lie in huge pages: 0 where the kernel has no such call.
    """
    if sys.platform != "linux":
        return 0
    system = ctypes.CDLL(None)
    moved = 0
    for start, end in page_ranges(model.parameters()):
        for page in range(start, end, PAGE_BYTES):
            # It fails for a page that also holds unmapped addresses, as the first and the last may.
            done = system.madvise(ctypes.c_void_p(page), ctypes.c_size_t(PAGE_BYTES), _COLLAPSE) == 0
            moved += PAGE_BYTES * done
    return moved


def page_ranges(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    """The addresses `[start, end)` of the huge pages that hold these weights, in order and without overlap.

    Weights that lie beside each other share pages. Weights on other devices and tensors that wrap others are left out.
    """
    plain = (w for w in weights if type(w) in (Tensor, nn.Parameter) and w.device == torch.device("cpu") and w.numel())
    spans = sorted((w.data_ptr(), w.data_ptr() + w.nbytes) for w in plain if w.is_contiguous())
    ranges: list[tuple[int, int]] = []
    for start, end in spans:
        start, end = start // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES
        if ranges and start <= ranges[-1][1]:
            start, end = ranges[-1][0], max(end, ranges.pop()[1])
        ranges.append((start, end))
    return ranges
