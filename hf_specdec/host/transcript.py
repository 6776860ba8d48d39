"""The caller's view: texts, streamer, stopping criteria and scores, one column at a time as in plain `generate`.

Rows advance unevenly. A column is shown to the criteria and the streamer once every unfinished row has a token there,
so they always see a whole batch. EOS and the maximum length end a row at once, so that nothing more is drafted for it.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_specdec.config import FORESEEN_TOKENS
from hf_specdec.rules.shared_decisions import shared


class Transcript:
    """The growing texts of one call.

    Args:
        input_ids: `[B, P]`, the prompts.
        criteria: the criteria that `generate` built, including a `MaxLengthCriteria`.
        pad_token: pads finished rows; None if `generate` has none.
        streamer: receives one column `[B]` at a time.
        spare: extra columns after the maximum length, for drafts.
        keep_scores, keep_logits: whether to record processed scores and raw logits.

    Attributes:
        capacity: the most tokens of a row, including drafts.

    Raises:
        ValueError: the criteria set no maximum length.
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
        self.max_length = maximum_length(criteria)
        self.eos_tokens = frozenset(t for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.tolist())
        self._pads_ends = any(hasattr(c, "eos_token_id") for c in criteria)
        self._other_criteria = StoppingCriteriaList(
            c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
        )
        self._pad_token = pad_token if pad_token is not None else 0
        self._streamer = streamer
        self.capacity = max(self.max_length, self.prompt_length + 1) + spare
        self._spare = spare
        self._unsent: dict[tuple[int, int], int] = {}  # tokens not yet on the device, by row and column
        self._take(input_ids, min(self.capacity, self.prompt_length + FORESEEN_TOKENS + spare))
        self.lengths = [self.prompt_length] * self.batch_size
        self._shown = self.prompt_length
        self._first_end = self.capacity  # length at which the first row ended, if rows are padded from there
        self._done = [False] * self.batch_size
        self._at_eos = [False] * self.batch_size
        # Records for tokens that are not shown yet.
        self._rows: dict[str, list[deque[Tensor]]] = {
            kind: [deque() for _ in range(self.batch_size)]
            for kind, kept in (("scores", keep_scores), ("logits", keep_logits))
            if kept
        }
        self._columns: dict[str, list[Tensor]] = {kind: [] for kind in self._rows}

    def _take(self, ids: Tensor, columns: int) -> None:
        """Make the working buffer with `columns` columns, beginning with `ids`."""
        self._ids = ids.new_full((self.batch_size, columns), self._pad_token)
        self._ids[:, : ids.shape[1]] = ids
        # Decisions on tokens are made on the host: each single transfer from or to an accelerator takes about 20 µs.
        self._host = self._ids.cpu()
        # A numpy view: reading and writing a few numbers through it takes a tenth of the time.
        self._host_ids = self._host.numpy().data

    @property
    def device(self) -> torch.device:
        """The device of `ids`."""
        return self._ids.device

    @property
    def ids(self) -> Tensor:
        """`[B, N]`: prompts and all tokens so far, each row followed by spare columns; the working buffer."""
        if self._unsent:
            sent = torch.tensor([(*place, token) for place, token in self._unsent.items()], device=self.device)
            self._ids[sent[:, 0], sent[:, 1]] = sent[:, 2].to(self._ids.dtype)
            self._unsent.clear()
        return self._ids

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
        """The number of shown tokens that all rows have, excluding padding."""
        return min(*self.lengths, self._shown, self._first_end)

    @property
    def sequences(self) -> Tensor:
        """`[B, N]`: prompts and all shown tokens; a view of the working buffer."""
        return self.ids[:, : self._shown]

    @property
    def scores(self) -> tuple[Tensor, ...] | None:
        """Processed scores, `[B, V]` per shown column; zeros for finished rows."""
        return self._shown_columns("scores")

    @property
    def logits(self) -> tuple[Tensor, ...] | None:
        """Raw logits in float32, `[B, V]` per shown column; zeros for finished rows."""
        return self._shown_columns("logits")

    @property
    def records(self) -> bool:
        """Whether scores or logits are recorded."""
        return bool(self._rows)

    @property
    def keeps_logits(self) -> bool:
        """Whether raw logits are recorded."""
        return "logits" in self._rows

    def append(self, new_tokens: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Add a round's tokens to the rows, and drop tokens past a row's end.

        Returns:
            The number of tokens added to each row.

        Raises:
            ValueError: a token is -1, so it could not be drawn, see `sampling.draw`.
        """
        longest = max(self.lengths) + max(map(len, new_tokens)) + self._spare
        if longest > self._ids.shape[1]:
            self._take(self.ids, min(self.capacity, max(longest, 2 * self._ids.shape[1])))
        added = []
        for row, (tokens, room) in enumerate(zip(new_tokens, self.room, strict=True)):
            kept = list(tokens)[:room]
            for position, token in enumerate(kept):
                if token in self.eos_tokens:
                    kept = kept[: position + 1]
                    self._at_eos[row] = True
                    break
            if kept and kept[-1] < 0:
                raise ValueError(
                    f"do_sample=True: the model's scores for row {row} after {self.lengths[row]} tokens contain NaN or "
                    "infinity, or exclude every token: check the weights, the dtype and the logits processors."
                )
            start = self.lengths[row]
            for column, token in enumerate(kept, start):
                self._write(row, column, token)
            self.lengths[row] = start + len(kept)
            added.append(len(kept))
        return tuple(added)

    def _write(self, row: int, column: int, token: int) -> None:
        self._host_ids[row, column] = token
        if self._host is not self._ids:
            self._unsent[row, column] = token

    def record(self, kind: str, values: Tensor, counts: Sequence[int]) -> None:
        """Record "scores" or "logits" `[B, K, V]` for the last `counts` tokens appended to each row."""
        for row, count in enumerate(counts if kind in self._rows else ()):
            # Copied, because views would keep the whole round in memory.
            self._rows[kind][row] += values[row, :count].to(torch.float32, copy=True).unbind()

    def show(self) -> None:
        """Show all complete columns: call the criteria, then the streamer."""
        while not self.finished and all(self._ended(row) or n > self._shown for row, n in enumerate(self.lengths)):
            self._show_column(self._shown)

    def end(self) -> None:
        """End the stream."""
        if self._streamer is not None:
            self._streamer.end()

    def answers(self, before: int) -> list[list[int]]:
        """Each row's new tokens so far, after the last `before` tokens of its prompt."""
        first = max(self.prompt_length - before, 0)
        rows = self.sequences[:, first:].tolist()
        return [row[: length - first] for row, length in zip(rows, self.lengths, strict=True)]

    def _ended(self, row: int) -> bool:
        """Whether a row is finished, so that plain `generate` would pad it."""
        return self._at_eos[row] or (self._done[row] and self._pads_ends)

    def _show_column(self, column: int) -> None:
        for row, done in enumerate(self._done):
            if done and self._pads_ends:
                self._write(row, column, self._pad_token)
        self._shown = column + 1
        for kind, rows in self._rows.items():
            self._columns[kind].append(_next_column(rows))
        stops = self._stops(column)
        self._done = [done or stop for done, stop in zip(self._done, stops, strict=True)]
        if self._pads_ends and any(stops):
            # A criterion may end a row before the last token of a round.
            self._first_end = min(self._first_end, self._shown)
        if self._streamer is not None:
            self._streamer.put(self._host[:, column])

    def _stops(self, column: int) -> list[bool]:
        """Which rows end at this column."""
        stops = [column + 1 >= self.max_length] * self.batch_size
        if self.eos_tokens:
            tokens = [self._host_ids[row, column] for row in range(self.batch_size)]
            stops = [stop or token in self.eos_tokens for stop, token in zip(stops, tokens, strict=True)]
        if self._other_criteria:
            asked = shared(self._other_criteria(self.ids[:, : column + 1], self.scores))
            stops = [stop or bool(other) for stop, other in zip(stops, asked.tolist(), strict=True)]
        return stops

    def _shown_columns(self, kind: str) -> tuple[Tensor, ...] | None:
        return tuple(self._columns[kind]) if kind in self._columns else None


def maximum_length(criteria: StoppingCriteriaList) -> int:
    """The length at which a text ends, from the criteria that `generate` built; part of a token counts as one.

    Raises:
        ValueError: none of them sets a maximum length.
    """
    limits = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    if not limits:
        raise ValueError("max_length=None: speculation needs a maximum length, so pass max_new_tokens or max_length.")
    return math.ceil(min(*limits, sys.maxsize))


def _next_column(rows: Sequence[deque[Tensor]]) -> Tensor:
    """`[B, V]`: remove and return each row's next recorded scores; zeros for rows without any."""
    nothing = torch.zeros_like(next(row[0] for row in rows if row))
    return torch.stack([row.popleft() if row else nothing for row in rows])
