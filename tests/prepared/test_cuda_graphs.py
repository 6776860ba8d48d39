"""Captured steps, with CUDA stood in for: what a failed capture leaves behind, and what graphs share."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.cuda_graphs import CapturedStep, new_pool

DEVICE = torch.device("cuda", 0)


class Stream:
    def __init__(self, *_) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Cuda:
    """The part of `torch.cuda` that capturing uses; a capture that fails leaves its stream current, as torch's does."""

    Stream = Stream

    def __init__(self) -> None:
        self.default = self.current = Stream()
        self.captures: list[dict] = []
        self.replayed_on: list[Stream] = []
        cuda = self

        class CUDAGraph:
            def replay(self) -> None:
                cuda.replayed_on.append(cuda.current)

        self.CUDAGraph = CUDAGraph

    @contextmanager
    def device(self, _):
        yield

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph, **options):
        self.captures.append(options)
        self.current = options["stream"]
        before = self.default
        yield
        self.current = before

    def current_stream(self, *_):
        return self.current

    def default_stream(self, *_):
        return self.default

    def set_stream(self, stream) -> None:
        self.current = stream

    def graph_pool_handle(self):
        return object()


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    stand_in = Cuda()
    monkeypatch.setattr(cuda_graphs.torch, "cuda", stand_in)
    cuda_graphs._place.cache_clear()
    yield stand_in
    cuda_graphs._place.cache_clear()


def test_a_failed_capture_surfaces_and_restores_the_stream(cuda: Cuda) -> None:
    calls = []

    def step(*_):
        calls.append(cuda.current)
        if len(calls) > 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="capturing"):
        CapturedStep(step, DEVICE, None)()
    assert len(calls) == 3 and calls[-1] is not cuda.default and cuda.current is cuda.default


def test_graphs_of_a_device_share_a_stream_and_let_other_threads_allocate(cuda: Cuda) -> None:
    for _ in range(2):
        CapturedStep(lambda: None, DEVICE, None)()
    first, second = cuda.captures
    assert first["stream"] is second["stream"] and first["capture_error_mode"] == "thread_local"


def test_graphs_share_memory_only_with_those_of_their_own_engine(cuda: Cuda) -> None:
    """The others may run between the drafts of a round and their verification, and would overwrite them."""
    for pool in (new_pool(DEVICE), new_pool(DEVICE)):
        for _ in range(2):
            CapturedStep(lambda: None, DEVICE, pool)()
    pools = [capture["pool"] for capture in cuda.captures]
    assert pools[0] is pools[1] and pools[2] is pools[3] and pools[1] is not pools[2]


def test_a_graph_takes_its_work_space_from_its_own_pool(cuda: Cuda, monkeypatch) -> None:
    """The process's is freed before the capture, and the graph's is forgotten behind it, also if the capture fails."""
    events: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: events.append("freed"), raising=False)
    CapturedStep(lambda: events.append("run"), DEVICE, None)()
    assert events == ["run", "run", "freed", "run", "freed"]
    events.clear()

    def step() -> None:
        events.append("run")
        if len(events) > 3:
            raise RuntimeError("not while capturing")

    with pytest.raises(RuntimeError, match="capturing"):
        CapturedStep(step, DEVICE, None)()
    assert events == ["run", "run", "freed", "run", "freed"]


def test_graphs_never_overlap(cuda: Cuda) -> None:
    """All replay on one stream, which waits for the caller's and is waited for."""
    captured, own = CapturedStep(lambda: None, DEVICE, None), Stream()
    cuda.current = own
    captured()
    assert cuda.replayed_on == [cuda.default]
    assert own in cuda.default.waited and cuda.default in own.waited and cuda.current is own


def test_one_thread_captures_at_a_time(cuda: Cuda) -> None:
    inside, together = [], []

    def step() -> None:
        inside.append(1)
        together.append(len(inside))
        threading.Event().wait(0.01)
        inside.pop()

    threads = [threading.Thread(target=CapturedStep(step, DEVICE, None)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1] * 9
