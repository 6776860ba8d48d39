"""`Program`: a compiled step as its segments' code, called one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_specdec.prepared.code_on_disk import Code
from hf_specdec.prepared.lent_tensors import Lent, Place


@dataclass(frozen=True)
class Call:
    """A segment's code and its inputs.

    Args:
        code: the compiled function.
        sources: the number of each input's value, see `Program`.
    """

    code: Code
    sources: tuple[int, ...]


class Program:
    """The calls of a step in order. Values are numbered: constants, then the step's inputs, then all outputs.

    Args:
        calls: the segments' code.
        constants: the step's own tensors, and the places of tensors lent to it, such as weights.
        results: the numbers of the values to return.
        lent: lends tensors by place.
    """

    def __init__(
        self, calls: Sequence[Call], constants: Sequence[Tensor | Place], results: Sequence[int], lent: Lent
    ) -> None:
        self._calls, self._given, self._results = tuple(calls), tuple(constants), tuple(results)
        self._lent, self._places = lent, [place for place in constants if not isinstance(place, Tensor)]
        self._constants: list[Tensor] | None = None

    def __call__(self, given: list[Tensor]) -> Sequence[Tensor]:
        """Run the step on its inputs `given`, and return its results."""
        if self._constants is None:
            taken = iter(self._lent.take(self._places, self._let_go))
            self._constants = [held if isinstance(held, Tensor) else next(taken) for held in self._given]
        values = [*self._constants, *given]
        for call in self._calls:
            values += call.code([values[source] for source in call.sources])
        return [values[at] for at in self._results]

    def _let_go(self) -> None:
        self._constants = None
