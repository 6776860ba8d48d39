"""Uses fewer of torch's threads while other work needs the processors.

The threads of a pass wait for each other hundreds of times, spinning. If one of them loses its processor to another
process, or to a container's CPU quota, all wait until it runs again: on two processors with a single other process,
two threads take two to eight times as long as one. Linux counts how long threads were ready to run without a
processor. If this is known, a call gives up as many threads as lack a processor, and tries again later.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

import torch

WINDOW = 0.1  # seconds; the shortest window to judge
LACKING, ENOUGH = 0.25, 0.05  # missing processors on average over a window: above, too few; below, enough
PATIENCE, MOST_PATIENCE = 0.5, 16.0  # seconds with enough processors before one more thread is tried

_THREADS = "/proc/self/task"


class ThreadCount:
    """The number of threads that a process should use.

    Args:
        full: the number that the user wants.
    """

    def __init__(self, full: int) -> None:
        self.full = self.used = full
        self._calm, self._patience, self._trying = 0.0, PATIENCE, False

    def observe(self, seconds: float, waited: float) -> None:
        """Learn from a window.

        Args:
            seconds: its length.
            waited: seconds for which threads were ready without a processor, summed over all threads.
        """
        lacking = waited / seconds
        self._calm = self._calm + seconds if lacking < ENOUGH else 0.0
        if lacking > LACKING and self.used > 1:
            self.used = max(1, self.used - max(1, round(lacking)))
            self._patience = min(2 * self._patience, MOST_PATIENCE) if self._trying else PATIENCE
            self._trying = False
        elif self._calm >= self._patience:
            self._trying, self._calm = self.used < self.full, 0.0
            self.used = min(self.used + 1, self.full)


_lock = threading.Lock()
_count = ThreadCount(1)
_running = 0  # number of calls that may have changed torch's number of threads


@contextmanager
def fitting_threads(device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each round, which adapts torch's number of threads to the free processors.

    Afterwards the user's number is restored. A call begins with what the previous one has learned. Nothing happens if
    the models run on an accelerator or with one thread, or if the system does not report how long threads waited.
    """
    global _count, _running
    before = None if device.type != "cpu" or _users_number() == 1 else seconds_waited()
    if before is None:
        yield lambda: None
        return
    with _lock:
        full = _users_number()
        if full != _count.full:
            _count = ThreadCount(full)
        _running += 1
    began = perf_counter()

    def fit() -> None:
        """Judge the window, if it is long enough, and begin the next."""
        nonlocal before, began
        now = perf_counter()
        if now - began < WINDOW or (waited := seconds_waited()) is None:
            return
        with _lock:
            # The later sum lacks threads that have ended since.
            _count.observe(now - began, max(waited - (before or 0.0), 0.0))
        _use(_count.used)
        before, began = waited, now

    try:
        _use(_count.used)
        yield fit
    finally:
        with _lock:
            _running -= 1
        _use(full)


@contextmanager
def all_threads() -> Iterator[None]:
    """Use the user's number of threads within the block, since code is compiled for that number."""
    present = torch.get_num_threads()
    try:
        _use(_users_number())
        yield
    finally:
        _use(present)


def _users_number() -> int:
    """torch's number of threads as the user set it; in a thread started during a call, that call's number."""
    present = torch.get_num_threads()
    return _count.full if _running and present == _count.used else present


def seconds_waited() -> float | None:
    """Seconds for which this process's threads, in sum, were ready to run without a processor; None if unknown."""
    waited = 0
    try:
        for thread in os.listdir(_THREADS):
            with suppress(FileNotFoundError, ProcessLookupError), open(f"{_THREADS}/{thread}/schedstat") as file:
                waited += int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return waited / 1e9


def _use(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
