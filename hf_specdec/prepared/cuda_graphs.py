"""Steps of a round captured as CUDA graphs, and the preparation of steps on each kind of device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from hf_specdec.compat.torch_private import free_cublas_work_space
from hf_specdec.prepared.compiled_step import CompiledStep, Step
from hf_specdec.prepared.lent_tensors import Lent


def captures(device: torch.device) -> bool:
    """Whether prepared rounds pay without compiling: on CUDA, where their steps are captured as graphs."""
    return device.type == "cuda"


def new_pool(device: torch.device) -> Any:
    """A memory pool for graphs of which only one, with its results, is in use at a time; None if none is needed.

    Replaying a graph overwrites the results of graphs that were captured after it in the same pool.
    """
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def prepare(
    step: Step,
    device: torch.device,
    name: str,
    args: tuple[Any, ...] = (),
    *,
    compile: bool,
    pool: Any,
    lent: Lent | None = None,
) -> Step:
    """The step ready to run: compiled for arguments like `args` if `compile`, then captured if on CUDA.

    Args:
        pool: from `new_pool`.
        lent: as in `CompiledStep`.
    """
    if compile:
        compiled = step = CompiledStep(step, device, name, lent)
        compiled.compile(*args)
    return CapturedStep(step, device, pool) if device.type == "cuda" else step


class CapturedStep:
    """A step captured as a CUDA graph at the first call and replayed at later ones.

    Every call must pass the same tensor objects, whose contents may change. The returned tensors are the same objects
    each time; the next replay overwrites them.

    Args:
        step: the function to capture.
        device: a GPU.
        pool: from `new_pool`.
    """

    def __init__(self, step: Step, device: torch.device, pool: Any) -> None:
        self._step: Step | None = step
        self._place, self._pool = _place(device), pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self, *args: Any) -> Any:
        """Replay the graph; the first call captures it.

        Raises:
            Exception: whatever the step or the capture raises; the current stream is restored.
        """
        with self._place.lock, torch.cuda.device(self._place.device):
            if self._graph is None:
                self._capture(*args)
            assert self._graph is not None
            self._place.replay(self._graph)
        return self._result

    def _capture(self, *args: Any) -> None:
        """Warm up on the capture stream, which `torch.cuda.graph` requires, then capture."""
        assert self._step is not None
        stream, before = self._place.stream, torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step(*args)
            before.wait_stream(stream)
            # Other threads may allocate while this one captures.
            options = {"pool": self._pool, "stream": stream, "capture_error_mode": "thread_local"}
            with _own_work_space(), torch.cuda.graph(graph, **options):
                self._result = self._step(*args)
        finally:
            # A failed capture leaves its stream current.
            torch.cuda.set_stream(before)
        self._graph, self._step = graph, None


@contextmanager
def _own_work_space() -> Iterator[None]:
    """Let a graph take the work space of its matrix products from its own pool.

    Otherwise it would use the process's, which torch frees when it captures its own graphs (`torch.compile` with
    `mode="reduce-overhead"`, as in `generate` with a static cache): the next replay would write to freed memory.
    """
    free_cublas_work_space()
    try:
        yield
    finally:
        free_cublas_work_space()


class _Place:
    """The capture stream that all graphs of a device share, and the lock that runs one at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.stream = torch.cuda.Stream(device)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Run a graph on the default stream, since graphs that share memory must not overlap."""
        current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
        if current == default:
            graph.replay()
            return
        default.wait_stream(current)
        with torch.cuda.stream(default):
            graph.replay()
        current.wait_stream(default)


@cache
def _place(device: torch.device) -> _Place:
    return _Place(device)
