"""`Forks`: copies of stateful processors, which follow one draft and are then dropped."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hf_specdec.host.processors import HostProcessors


class Forks:
    """Copies of the processors in their state after a text, for rows of equal length.

    They see what they would if every draft were kept: the whole batch, one column after another, with padding in ended
    rows.

    Args:
        processors: the processors for drafts.
        texts: `[B, n]`, the kept texts.
        rows: the rows that have not ended.
        eos_tokens: tokens that end a row.
    """

    def __init__(
        self, processors: HostProcessors, texts: Tensor, rows: Collection[int], eos_tokens: frozenset[int]
    ) -> None:
        self._processors = processors.forked()
        self._texts = texts
        self._ended = torch.tensor([row not in rows for row in range(len(texts))], device=texts.device)
        self._eos = torch.tensor(sorted(eos_tokens), device=texts.device, dtype=texts.dtype)

    def process(self, scores: Tensor, rows: Sequence[int]) -> Tensor:
        """Process the scores `[B, V]` of the next column; only the results of `rows` are needed."""
        return self._processors.next_scores(self._texts, scores, rows)

    def append(self, tokens: Tensor) -> None:
        """Add a column of drafts `[B]` to the texts."""
        column = tokens.masked_fill(self._ended, self._processors.pad_token)
        self._texts = torch.cat([self._texts, column.unsqueeze(1)], dim=1)
        self._ended = self._ended | torch.isin(column, self._eos)
