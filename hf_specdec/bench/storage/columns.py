"""Calls as columns: tokens, texts and rounds that several calls share are written once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hf_specdec.bench.running.round_records import Rounds, Spent
from hf_specdec.bench.running.timed_call import Call

_DIGITS = 5  # significant digits of times: what lies below is noise, and takes most of a file
_PLAIN = ("method", "prompts", "repeat", "position", "seconds", "first_seconds", "again", "preparing")
_SPENT = ("draft", "verify", "whole")


def rounded(value: Any) -> Any:
    """The same data with its floats to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Shared:
    """Each value once, in the order of first appearance."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def place(self, value: Any) -> int:
        key = json.dumps(value)
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value)
        return self._places[key]


def pack(calls: Sequence[Call]) -> dict[str, Any]:
    """JSON-serialisable. A call's `answers` are places in `answers`: a repeat that answered otherwise has others."""
    answers, rounds, texts = _Shared(), _Shared(), dict[int, str]()
    columns: dict[str, list[Any]] = {name: [] for name in (*_PLAIN, "answers", "rounds", "spent")}
    for call in calls:
        for name in _PLAIN:
            columns[name].append(rounded(getattr(call, name)))
        places = [answers.place(row) for row in call.tokens]
        texts |= dict(zip(places, call.texts or (), strict=False))
        columns["answers"].append(places)
        columns["rounds"].append(None if call.rounds is None else rounds.place(asdict(call.rounds)))
        columns["spent"].append(call.spent and [rounded(getattr(call.spent, part)) for part in _SPENT])
    told = [texts.get(place) for place in range(len(answers.values))]
    return {"calls": columns, "answers": {"tokens": answers.values, "texts": told}, "rounds": rounds.values}


def unpack(packed: Mapping[str, Any]) -> list[Call]:
    """The calls that `pack` was given, their times rounded."""
    columns, answers = packed["calls"], packed["answers"]
    rounds = [Rounds(**item) for item in packed["rounds"]]
    calls = []
    for row in zip(*columns.values(), strict=True):
        one = dict(zip(columns, row, strict=True))
        places, number, spent = one.pop("answers"), one.pop("rounds"), one.pop("spent")
        texts = [answers["texts"][place] for place in places]
        calls.append(
            Call(
                **{**one, "prompts": tuple(one["prompts"])},
                tokens=[answers["tokens"][place] for place in places],
                texts=None if None in texts else texts,
                rounds=None if number is None else rounds[number],
                spent=None if spent is None else Spent(*spent),
            )
        )
    return calls


def as_record(call: Call) -> dict[str, Any]:
    """A single call, for the journal."""
    return rounded(asdict(call))


def from_record(record: Mapping[str, Any]) -> Call:
    """The call that `as_record` was given."""
    rounds, spent = record["rounds"], record["spent"]
    return Call(
        **{
            **{key: value for key, value in record.items() if key != "kind"},
            "prompts": tuple(record["prompts"]),
            "rounds": None if rounds is None else Rounds(**rounds),
            "spent": None if spent is None else Spent(**spent),
        }
    )
