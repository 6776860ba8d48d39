"""A streamer that keeps what it is fed."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Streamer:
    """Remembers what it is fed; breaks off with `error` at a given call."""

    def __init__(self, error: type[BaseException] | None = None, at: int = 4) -> None:
        self.calls: list[Any] = []
        self.error, self.at = error, at

    def put(self, value: Tensor) -> None:
        """A column, or the prompt."""
        self.calls.append(value.tolist())
        if self.error is not None and len(self.calls) == self.at:
            raise self.error("enough")

    def end(self) -> None:
        """The end."""
        self.calls.append("end")
