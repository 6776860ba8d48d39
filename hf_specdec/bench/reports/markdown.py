"""Markdown primitives: tables and how figures are written; – stands for what is not defined."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns also line up as plain text; the first column to the left."""
    # Two at least: a rule needs a dash beside its colon.
    widths = [max(2, *(len(row[column]) for row in [header, *rows])) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])


def capital(title: str) -> str:
    """The title with its first letter large."""
    return title[0].upper() + title[1:]


def number(value: float | None, digits: int) -> str:
    """Fixed point; – for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def mean_and_spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation of repeats; the mean alone for one, – for none."""
    if not values:
        return "–"
    if len(values) == 1:
        return number(values[0], digits)
    return f"{number(mean(values), digits)} ± {number(stdev(values), digits)}"


def percent(value: float | None) -> str:
    """A share as a percentage with one digit."""
    return "–" if value is None else f"{100 * value:.1f}%"
