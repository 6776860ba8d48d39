"""Counts the time of a run over all its starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """Counts seconds up to a limit, including those of earlier starts, which are in `file`.

    Args:
        file: where `save` writes the seconds spent.
        limit: in seconds.

    Attributes:
        before: the seconds of earlier starts.
    """

    def __init__(self, file: Path, limit: float) -> None:
        self.file, self.limit = file, limit
        self.before = float(file.read_text()) if file.exists() else 0.0
        self._start = monotonic()

    @property
    def spent(self) -> float:
        return self.before + monotonic() - self._start

    @property
    def share(self) -> float:
        return self.spent / self.limit

    @property
    def over(self) -> bool:
        return self.spent >= self.limit

    def save(self) -> None:
        partial = self.file.with_name(f"{self.file.name}.partial")
        partial.write_text(f"{self.spent:.1f}")
        partial.replace(self.file)

    def until_over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items while there is time; saves after each."""
        iterator = iter(items)
        while not self.over and (item := next(iterator, None)) is not None:
            yield item
            self.save()
