"""How much memory tensors take at most, counted operation by operation, and how much a process takes."""

import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class LargeStorages(TorchDispatchMode):
    """Counts the storages of at least `least` bytes that are alive after each operation.

    Attributes:
        peak: the most bytes that they had together.
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.peak = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= self.least:
                storage = tensor.untyped_storage()
                self._alive[storage.data_ptr()] = weakref.ref(storage), storage.nbytes()
        self._alive = {place: known for place, known in self._alive.items() if known[0]() is not None}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result
