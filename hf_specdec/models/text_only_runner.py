"""Passes of a text-only draft for a target that reads pictures: the placeholders are removed from its prompt.

To the draft, the hundreds of placeholders are an unknown token, repeated. Without them, its prompt pass and its context
hold the text alone. Gagrani et al. (2024, arXiv 2404.08856) also draft without pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.dynamic_runner import PER_TOKEN_KWARGS
from hf_specdec.models.runner_choice import Runner
from hf_specdec.models.traits import PLACEHOLDERS


def text_places(target: PreTrainedModel, input_ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The columns of each prompt that hold text.

    Args:
        target: its configuration names the placeholders.
        input_ids: `[B, P]`, the prompts.
        mask: `[B, P]`, their attention mask; None if nothing is masked.

    Returns:
        The columns `[B, P']` of `input_ids` to read, and their attention mask `[B, P']`: shorter texts are padded on
        the left. None if no prompt has a placeholder.
    """
    tokens = [value for name in PLACEHOLDERS if isinstance(value := getattr(target.config, name, None), int)]
    placeholder = torch.isin(input_ids, input_ids.new_tensor(tokens))
    placeholder[:, -1] = False  # so that each row has a token to read
    if not bool(placeholder.any()):
        return None
    kept = (~placeholder).long() if mask is None else mask.long().masked_fill(placeholder, 0)
    columns = kept.argsort(dim=1, stable=True)[:, -int(kept.sum(1).max()) :]
    return columns, kept.gather(1, columns)


def text_kwargs(kwargs: dict[str, Any], mask: Tensor) -> dict[str, Any]:
    """A draft's arguments for text-only prompts with the attention mask `[B, P']`; positions follow from it."""
    rest = {key: value for key, value in kwargs.items() if key not in ("position_ids", *PER_TOKEN_KWARGS)}
    return {**rest, "attention_mask": mask}


class TextOnlyRunner:
    """Runs a draft on the text alone; to its caller, the placeholders count as read.

    The methods are those of `DynamicRunner`. The first pass must begin with the whole prompt.

    Args:
        runner: runs the draft, made for text-only prompts `[B, P']`.
        columns: `[B, P']`, their columns in the prompts, see `text_places`.
        prompt_length: P.
    """

    def __init__(self, runner: Runner, columns: Tensor, prompt_length: int) -> None:
        self._runner = runner
        self._columns, self._prompt_length = columns, prompt_length
        self.left_out = prompt_length - columns.shape[1]
        self.rewinds_far = runner.rewinds_far

    @property
    def read(self) -> list[int]:
        """Tokens that each row has read, placeholders included."""
        return [n + self.left_out if n else 0 for n in self._runner.read]

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """As `DynamicRunner.forward`."""
        if not any(self._runner.read):
            prompts, rest = tokens.split([self._prompt_length, tokens.shape[1] - self._prompt_length], dim=1)
            tokens = torch.cat([prompts.gather(1, self._columns.to(tokens.device)), rest], dim=1)
        return self._runner.forward(tokens, count)

    def rewind(self, lengths: Sequence[int]) -> None:
        """As `DynamicRunner.rewind`; not into the prompt."""
        self._runner.rewind([max(length - self.left_out, 0) for length in lengths])

    def retain(self, rows: Sequence[int]) -> Sequence[int]:
        """As `DynamicRunner.retain`."""
        return self._runner.retain(rows)
