"""Passes of one model over the rows of a batch one by one, with a runner for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_specdec.models import cache_rollback
from hf_specdec.models.cache_names import cache_argument, cache_of
from hf_specdec.models.dynamic_runner import DynamicRunner
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.traits import media_of


class RowByRowRunner:
    """Runs one model row by row, for decoders in which a token's position is its slot (BART, Pegasus, Marian).

    The methods and arguments are those of `DynamicRunner`.
    """

    rewinds_far = settled = True

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
        *further: Any,
    ) -> None:
        given, argument = cache_of(model_kwargs), cache_argument(model)
        if given is not None and given.get_seq_length() > 0:
            raise ValueError(
                f"{argument}={type(given).__name__} is filled, and the {len(input_ids)} rows of "
                f"{type(model).__name__} run one by one: pass one row per call, or leave the cache out."
            )
        media = media_of(model_kwargs).values()
        if any(not isinstance(value, Tensor) or len(value) != len(input_ids) for value in media):
            raise ValueError(
                f"pictures or sound for {len(input_ids)} rows of {type(model).__name__}: its rows run one by one, and "
                "the parts can't be assigned to rows, so pass one row per call."
            )
        cross_attention = "encoder_outputs" in model_kwargs
        self.cache = None
        self.rows = []
        for row in range(len(input_ids)):
            kwargs = {key: row_of(value, row, len(input_ids)) for key, value in model_kwargs.items()}
            kwargs[argument] = (
                cache_rollback.new_cache(model, "model", cross_attention=cross_attention) if given is not None else None
            )
            ids = input_ids[row : row + 1]
            self.rows.append(DynamicRunner(model, kwargs, ids, *further))
        self._fed: Sequence[int] = range(len(self.rows))
        self.states: HiddenStates | None = None
        self.stages, self.prompt_alone = self.rows[0].stages, self.rows[0].prompt_alone

    @property
    def read(self) -> list[int]:
        """Tokens that each row has read."""
        return [runner.read[0] for runner in self.rows]

    @property
    def passes(self) -> int:
        """Forward passes so far, over all rows."""
        return sum(runner.passes for runner in self.rows)

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """As `DynamicRunner.forward`."""
        places = self.read
        logits = {row: self.rows[row].forward(tokens[row : row + 1], count) for row in self._fed}
        if self.states is not None:
            self.states.add(
                [n + tokens.shape[1] for n in places], self._joined(self._handed_out(places, tokens.shape[1]))
            )
        return self._joined(logits)

    def _joined(self, by_row: Mapping[int, Tensor]) -> Tensor:
        """Join some rows' tensors; the other rows are zero."""
        nothing = torch.zeros_like(next(iter(by_row.values())))
        return torch.cat([by_row.get(row, nothing) for row in range(len(self.rows))])

    def _handed_out(self, places: Sequence[int], width: int) -> dict[int, Tensor]:
        """Take the hidden states `[1, width, H]` that the rows have just handed out."""
        handed = {}
        for row in self._fed:
            states = self.rows[row].states
            assert states is not None, "set by `hand_out`"
            handed[row] = states.of([places[row]], width)
            states.drop([self.rows[row].read[0]])
        return handed

    def hand_out(self, states: HiddenStates) -> None:
        """As `DynamicRunner.hand_out`."""
        self.states = states
        for runner in self.rows:
            runner.hand_out(HiddenStates(states.layers))

    def rewind(self, lengths: Sequence[int]) -> None:
        """As `DynamicRunner.rewind`."""
        for runner, length in zip(self.rows, lengths, strict=True):
            runner.rewind([length])

    def set_aside(self, rows: Sequence[int], position: int) -> None:
        """As `DynamicRunner.set_aside`; rows that run by themselves affect no other."""

    def retain(self, rows: Sequence[int]) -> Sequence[int]:
        """As `DynamicRunner.retain`."""
        self._fed = rows
        return rows

    def end(self, length: int) -> None:
        """As `DynamicRunner.end`."""
        for runner in self.rows:
            runner.end(length)


def row_of(value: Any, row: int, batch_size: int) -> Any:
    """One row of a model's argument: of tensors along their batch axis, of outputs field by field."""
    if isinstance(value, ModelOutput):
        return type(value)(**{key: row_of(field, row, batch_size) for key, field in value.items()})
    if isinstance(value, tuple):
        return tuple(row_of(item, row, batch_size) for item in value)
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch_size:
        return value[row : row + 1]
    return value
