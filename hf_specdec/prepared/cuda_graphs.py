"""Steps of a round captured as CUDA graphs, and how a step is prepared on each kind of device."""

from __future__ import annotations

from typing import Any

import torch

from hf_specdec.prepared.compiled_step import CompiledStep, Step


def captures(device: torch.device) -> bool:
    """Whether prepared rounds pay without compiling: on CUDA, where their steps are captured as graphs."""
    return device.type == "cuda"


def prepare(step: Step, device: torch.device, *, compile: bool) -> Step:
    """The step ready to run: compiled if `compile`, then captured if on CUDA."""
    if compile:
        step = CompiledStep(step, device)
    return CapturedStep(step, device) if device.type == "cuda" else step


class CapturedStep:
    """A step captured as a CUDA graph at the first call and replayed at later ones.

    Every call must pass the same tensor objects, whose contents may change. The returned tensors are the same objects
    each time; the next replay overwrites them.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step = step
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self, *args: Any) -> Any:
        """Replay the graph; the first call captures it."""
        with torch.cuda.device(self._device):
            if self._graph is None:
                self._record(*args)
            assert self._graph is not None
            self._graph.replay()
        return self._result

    def _record(self, *args: Any) -> None:
        """Warm up on a side stream, which `torch.cuda.graph` requires, then capture."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(*args)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._result = self._step(*args)
