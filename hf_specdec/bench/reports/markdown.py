"""How tables and figures are written; – stands for a figure that is not defined."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from tabulate import tabulate


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; the first column is aligned left, the others right."""
    align = ["left", *["right"] * (len(header) - 1)] if rows else None
    return tabulate(rows, headers=header, tablefmt="pipe", disable_numparse=True, colalign=align)


def capital(title: str) -> str:
    """The title with its first letter in upper case."""
    return title[0].upper() + title[1:]


def number(value: float | None, digits: int) -> str:
    """Fixed point."""
    return "–" if value is None else f"{value:.{digits}f}"


def mean_and_spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation of the repeats."""
    if not values:
        return "–"
    if len(values) == 1:
        return number(values[0], digits)
    return f"{number(mean(values), digits)} ± {number(stdev(values), digits)}"


def percent(value: float | None) -> str:
    """A share as a percentage with one digit."""
    return "–" if value is None else f"{100 * value:.1f}%"
