"""Tensors that compiled steps read without holding them between calls: weights and caches.

A step that held a model's weights would keep them in memory, and read them, after they were replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Place = tuple[int, int]  # the index of a source, and of a tensor in it


class Lent:
    """Lends tensors to the steps of an engine, from their first call within a `generate` until `take_back`.

    Args:
        sources: each lists tensors, always in the same order and of the same forms.
    """

    def __init__(self, *sources: Callable[[], Sequence[Tensor]]) -> None:
        self._sources = sources
        self._listed: list[list[Tensor]] = []
        self._borrowers: list[Callable[[], None]] = []

    def places(self) -> dict[int, Place]:
        """The place of each tensor, by its `id`."""
        self._listed = [list(source()) for source in self._sources]
        found: dict[int, Place] = {}
        for number, tensors in enumerate(self._listed):
            for at, tensor in enumerate(tensors):
                found.setdefault(id(tensor), (number, at))
        return found

    def take(self, places: Sequence[Place], let_go: Callable[[], None]) -> list[Tensor]:
        """Lend the tensors in some places; `let_go` is called when they must be released."""
        if not self._listed:
            self.places()
        self._borrowers.append(let_go)
        return [self._listed[number][at] for number, at in places]

    def take_back(self) -> None:
        """Make all borrowers release their tensors."""
        self._listed = []
        while self._borrowers:
            self._borrowers.pop()()
