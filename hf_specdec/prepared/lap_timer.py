"""Times the parts of a round, on the CPU and on CUDA."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

import torch


class LapTimer:
    """Seconds between marks: the host's clock on a CPU, CUDA events on a GPU, where the host only queues work.

    Args:
        device: where the timed work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """End a lap and begin the next."""
        if self._device.type != "cuda":
            self._times.append(perf_counter())
            return
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> list[float]:
        """The duration of each lap so far, in seconds; waits for the device to finish the last one."""
        if not self._events:
            return [end - start for start, end in pairwise(self._times)]
        self._events[-1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairwise(self._events)]
