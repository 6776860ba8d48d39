"""Runs models with recurrent layers like `DynamicRunner`, and also rolls back their states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_specdec.models import cache_rollback, recurrences
from hf_specdec.models.dynamic_runner import DynamicRunner
from hf_specdec.models.recurrent_states import RecurrentStates


class RecurrentRunner(DynamicRunner):
    """Runs one model with recurrent layers, all rows in one pass; arguments as for `DynamicRunner`.

    A row can only go back to lengths since the last `rewind`, within the last `count` tokens of a pass. The states of
    rows no longer in use are arbitrary.
    """

    rewinds_far = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._states = RecurrentStates(self.cache, recurrences.places(self.model))
        self._counting: Sequence[int] = range(len(self.read))

    def _pass(self, tokens: Tensor, count: int) -> Tensor:
        with self._states.passing(tokens.shape[1], count - 1):
            return super()._pass(tokens, count)

    def rewind(self, lengths: Sequence[int]) -> None:
        """As `DynamicRunner.rewind`."""
        if self._width:
            cuts = [max(n - length, 0) for n, length in zip(self.read, lengths, strict=True)]
            self._states.forget(cuts, self._counting)
        super().rewind(lengths)

    def reaches(self, lengths: Sequence[int]) -> bool:
        """Whether `rewind` can go back to `lengths`."""
        return max(self.read[row] - lengths[row] for row in self._counting) <= self._states.reach

    def retain(self, rows: Sequence[int]) -> Sequence[int]:
        """As `DynamicRunner.retain`."""
        self._counting = rows
        return super().retain(rows)

    def end(self, length: int) -> None:
        """As `DynamicRunner.end`; also empties the cache if rows ended further apart than a pass."""
        cut = max(max(self.read) - length, 0)
        if self._states.intact and cut <= self._states.reach:
            self._counting = range(len(self.read))
            self.rewind([length] * len(self.read))
        else:
            with self._mode():  # tensors written in inference mode can only be changed in it
                cache_rollback.forget_all(self.cache)
                self._states.forget_all()
        cache_rollback.stop_recording(self._recording)
