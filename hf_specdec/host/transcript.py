"""What the caller sees: texts, streamer, stopping criteria and scores, column by column as plain `generate` would.

Rows advance unevenly. A column is shown once every row that has not ended holds a token there; only then are the
criteria asked and the streamer fed, so that both see the batch just as plain `generate` shows it. Ends that a
token or a length decides by itself (EOS, maximum length) are known at once and cost a row no further drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class Transcript:
    """The growing texts of one call.

    Args:
        input_ids: `[B, P]` prompts.
        criteria: as `generate` built them; a `MaxLengthCriteria` among them bounds the length.
        pad_token: follows the end of a row; None where `generate` has none.
        streamer: fed one column `[B]` at a time.
        spare: columns of working space behind the longest text, for drafts.
        keep_scores, keep_logits: record processed scores and raw logits.
    """

    def __init__(
        self,
        input_ids: Tensor,
        criteria: StoppingCriteriaList,
        pad_token: int | None,
        streamer: Any = None,
        *,
        spare: int = 1,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        self.batch_size, self.prompt_length = input_ids.shape
        self.max_length = criteria.max_length
        if self.max_length is None:
            raise ValueError("max_length=None: speculation needs a bound, so pass max_new_tokens or max_length.")
        self.eos_tokens = frozenset(t for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.tolist())
        self._pads_ends = any(hasattr(c, "eos_token_id") for c in criteria)
        self._other_criteria = StoppingCriteriaList(
            c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
        )
        self._pad_token = pad_token if pad_token is not None else 0
        self._streamer = streamer
        capacity = max(self.max_length, self.prompt_length + 1) + spare
        self.ids = input_ids.new_full((self.batch_size, capacity), self._pad_token)
        self.ids[:, : self.prompt_length] = input_ids
        # The same memory; a few numbers are written there in a tenth of the time that a tensor takes.
        self._host_ids = self.ids.numpy() if self.ids.device.type == "cpu" else None
        self.lengths = [self.prompt_length] * self.batch_size
        self._shown = self.prompt_length
        self._first_end = capacity  # tokens shown when the first row ended, where it is padded from there
        self._done = [False] * self.batch_size
        self._at_eos = [False] * self.batch_size
        self._rows: dict[str, list[list[Tensor]]] = {
            kind: [[] for _ in range(self.batch_size)]
            for kind, kept in (("scores", keep_scores), ("logits", keep_logits))
            if kept
        }
        self._columns: dict[str, tuple[Tensor, ...]] = {kind: () for kind in self._rows}

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return all(self._done)

    @property
    def room(self) -> list[int]:
        """Tokens that may still be added to each row; 0 for rows that have ended."""
        return [
            0 if self._ended(row) else max(self.max_length - n, int(n == self.prompt_length))
            for row, n in enumerate(self.lengths)
        ]

    @property
    def common_length(self) -> int:
        """Tokens of its own that every row shows."""
        return min(*self.lengths, self._shown, self._first_end)

    @property
    def sequences(self) -> Tensor:
        """`[B, N]`: prompts and everything shown; a view of working space."""
        return self.ids[:, : self._shown]

    @property
    def scores(self) -> tuple[Tensor, ...] | None:
        """Processed scores, a `[B, V]` per shown column; rows that had ended hold zeros."""
        return self._columns.get("scores")

    @property
    def logits(self) -> tuple[Tensor, ...] | None:
        """Raw logits in float32, a `[B, V]` per shown column; rows that had ended hold zeros."""
        return self._columns.get("logits")

    @property
    def records(self) -> bool:
        """Whether scores or logits are recorded."""
        return bool(self._rows)

    @property
    def keeps_logits(self) -> bool:
        """Whether raw logits are recorded."""
        return "logits" in self._rows

    def append(self, new_tokens: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Add a round's tokens to the rows; what lies beyond a row's end is discarded.

        Returns:
            How many tokens each row really got.
        """
        added = []
        for row, (tokens, room) in enumerate(zip(new_tokens, self.room, strict=True)):
            kept = list(tokens)[:room]
            for position, token in enumerate(kept):
                if token in self.eos_tokens:
                    kept = kept[: position + 1]
                    self._at_eos[row] = True
                    break
            start = self.lengths[row]
            if kept:
                self._write(row, start, kept)
            self.lengths[row] = start + len(kept)
            added.append(len(kept))
        return tuple(added)

    def _write(self, row: int, start: int, tokens: list[int]) -> None:
        if self._host_ids is not None:
            self._host_ids[row, start : start + len(tokens)] = tokens
        else:
            self.ids[row, start : start + len(tokens)] = torch.tensor(tokens, device=self.ids.device)

    def record(self, kind: str, values: Tensor, counts: Sequence[int]) -> None:
        """Record scores or logits `[B, K, V]` of the tokens about to be shown; `counts` of them for each row."""
        if kind in self._rows:
            for row, count in enumerate(counts):
                self._rows[kind][row] += values[row, :count].unbind()

    def show(self) -> None:
        """Show every column that is complete: ask the criteria, then feed the streamer."""
        while not self.finished and all(self._ended(row) or n > self._shown for row, n in enumerate(self.lengths)):
            self._show_column(self._shown)

    def end(self) -> None:
        """Tell the streamer that nothing more will come."""
        if self._streamer is not None:
            self._streamer.end()

    def _ended(self, row: int) -> bool:
        """Whether a row needs no further tokens of its own: plain `generate` would only pad it."""
        return self._at_eos[row] or (self._done[row] and self._pads_ends)

    def _show_column(self, column: int) -> None:
        for row, done in enumerate(self._done):
            if done and self._pads_ends:
                self.ids[row, column] = self._pad_token
        self._shown = column + 1
        for kind, rows in self._rows.items():
            self._columns[kind] += (self._column_of(rows, column - self.prompt_length),)
        stops = self._stops(column)
        self._done = [done or stop for done, stop in zip(self._done, stops, strict=True)]
        if self._pads_ends and any(stops):
            # Less than a row's length where a criterion ended it amid a round's tokens.
            self._first_end = min(self._first_end, self._shown)
        if self._streamer is not None:
            self._streamer.put(self.ids[:, column].cpu())

    def _stops(self, column: int) -> list[bool]:
        """Which rows end with this column."""
        stops = [column + 1 >= self.max_length] * self.batch_size
        if self.eos_tokens:
            tokens = self.ids[:, column].tolist()
            stops = [stop or token in self.eos_tokens for stop, token in zip(stops, tokens, strict=True)]
        if self._other_criteria:
            asked = self._other_criteria(self.ids[:, : column + 1], self._columns.get("scores"))
            stops = [stop or bool(other) for stop, other in zip(stops, asked.tolist(), strict=True)]
        return stops

    def _column_of(self, rows: list[list[Tensor]], index: int) -> Tensor:
        known = next(values[index] for values in rows if index < len(values))
        return torch.stack([values[index] if index < len(values) else torch.zeros_like(known) for values in rows])
