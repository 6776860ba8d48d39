"""Fewer of torch's threads while other work needs the processors.

The threads of a pass wait for each other hundreds of times, and spin while they wait. If one of them loses its
processor to another process, or to a container's CPU quota, all wait until it runs again: on two processors with a
single other process, two threads take two to eight times as long as one. Linux counts how long threads were ready to
run and had no processor. Where that is known, a call gives up as many threads as lack one, and takes them back later.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

import torch

WINDOW = 0.1  # seconds that are judged together, at least
LACKING, ENOUGH = 0.25, 0.05  # processors that a window lacked on average
PATIENCE, MOST_PATIENCE = 0.5, 16.0  # seconds without lack after which one more thread is tried

_THREADS = "/proc/self/task"


class ThreadCount:
    """How many threads a process should use.

    Args:
        full: as many as the user wants.
    """

    def __init__(self, full: int) -> None:
        self.full = self.used = full
        self._calm, self._patience, self._trying = 0.0, PATIENCE, False

    def observe(self, seconds: float, waited: float) -> None:
        """Learn from a window.

        Args:
            seconds: its length.
            waited: how long all threads together were ready and had no processor, in seconds.
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
_running = 0  # calls that may have changed torch's number


@contextmanager
def fitting_threads(device: torch.device) -> Iterator[Callable[[], None]]:
    """Yields what is to be called after each round: it fits torch's number of threads to the processors that are left.

    The number is the user's again afterwards. What one call has learned is where the next begins. Nothing happens if
    the models run on an accelerator or with one thread, or if the system doesn't tell how long threads waited.
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
            # Threads that have ended meanwhile are missing from the later sum.
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
    """A block with the user's number of threads, for which code is compiled."""
    present = torch.get_num_threads()
    try:
        _use(_users_number())
        yield
    finally:
        _use(present)


def _users_number() -> int:
    """torch's number of threads without what calls have changed; a thread that began during one has that call's."""
    present = torch.get_num_threads()
    return _count.full if _running and present == _count.used else present


def seconds_waited() -> float | None:
    """How long the threads of this process, together, were ready to run and had no processor; None if not known."""
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
