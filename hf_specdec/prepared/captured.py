"""Callables without Python inside: replayed from a CUDA graph, or compiled; on a CPU without either, just called."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from hf_specdec.prepared.compiled import Compiled, Step


def captures(device: torch.device) -> bool:
    """Whether steps pay without being compiled: where a graph of them can be captured."""
    return device.type == "cuda"


def prepared(step: Step, device: torch.device, *, compile: bool) -> Step:
    """A step as it will run: compiled if asked for, captured on CUDA."""
    if compile:
        step = Compiled(step, device)
    return Captured(step, device) if device.type == "cuda" else step


class LapTimer:
    """Seconds between marks, by the host's clock; on CUDA, where work is only queued, by the device's own.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """A lap ends here, and another one begins."""
        if self._device.type != "cuda":
            self._times.append(perf_counter())
            return
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> list[float]:
        """Of all laps so far; waits until the last one is over."""
        if not self._events:
            return [end - start for start, end in pairwise(self._times)]
        self._events[-1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairwise(self._events)]


class Captured:
    """A CUDA graph of a step: recorded at the first call, replayed at later ones.

    All calls have to pass the same tensors; what they hold is read anew. The result's tensors are the same, too.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step = step
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self, *args: Any) -> Any:
        """Run the step."""
        with torch.cuda.device(self._device):
            if self._graph is None:
                self._record(*args)
            assert self._graph is not None
            self._graph.replay()
        return self._result

    def _record(self, *args: Any) -> None:
        """Warm up on a side stream, as capturing asks for, then capture."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(*args)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._result = self._step(*args)
