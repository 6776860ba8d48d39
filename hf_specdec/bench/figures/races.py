"""Which race of the task tune decides: of what a result stores, so that the choice and the reports agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# A race's stages as a result stores them, with the candidates `kept`, the fastest first, and their `ratios`.
Stages = Sequence[Mapping[str, Any]]


def deciding_race(races: Sequence[Stages]) -> int | None:
    """The number of the last race that measured enough examples for an interval, else of the last that ranks any.

    A later race has what is prepared, too, but its time may be too short. None where no race ranks any.
    """
    ranked = [number for number, stages in enumerate(races) if stages and stages[-1]["kept"]]
    sure = [number for number in ranked if _has_intervals(races[number][-1])]
    return max(sure or ranked, default=None)


def _has_intervals(stage: Mapping[str, Any]) -> bool:
    return any(stage["ratios"][name][1] is not None for name in stage["kept"])
