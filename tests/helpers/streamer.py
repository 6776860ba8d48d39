"""A streamer that keeps what it is fed."""

from typing import Any

from torch import Tensor


class Streamer:
    """Remembers what it is fed, among other things if a list is given; breaks off with `error` at a given call."""

    def __init__(self, error: type[BaseException] | None = None, at: int = 4, calls: list[Any] | None = None) -> None:
        self.calls: list[Any] = [] if calls is None else calls
        self.error, self.left = error, at

    def put(self, value: Tensor) -> None:
        """A column, or the prompt."""
        self.calls.append(value.tolist())
        self.left -= 1
        if self.error is not None and self.left == 0:
            raise self.error("enough")

    def end(self) -> None:
        """The end."""
        self.calls.append("end")
