"""Lengths that "auto" is made to choose."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from hf_specdec.lengths.auto_length import AutoLength


def choose_in_turn(monkeypatch, *lengths: int, first: int = 1) -> None:
    """What "auto" chooses after its first round, again and again; so that both kinds of rounds draft alike."""
    monkeypatch.setattr(AutoLength, "_begin", lambda self: setattr(self, "limit", first))
    turns: dict[AutoLength, Iterator[int]] = {}

    def choose(self: AutoLength) -> None:
        self.limit = next(turns.setdefault(self, cycle(lengths)))

    monkeypatch.setattr(AutoLength, "_choose", choose)
