"""How tables and figures are written; – stands for a figure that is not defined."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hf_specdec.bench.figures.bootstrap import Interval

# How a cell with a figure begins, or one without; for the alignment of its column.
_FIGURE = re.compile(r"[*+-]*\d|–|$")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; columns of figures are aligned right, others left, and always the first."""
    from tabulate import tabulate  # here, since a run without tables does without it

    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    align = [
        "right" if place and all(_FIGURE.match(row[place]) for row in rows) else "left" for place in range(len(header))
    ]
    return tabulate(rows, headers=header, tablefmt="pipe", disable_numparse=True, colalign=align if rows else None)


def capital(title: str) -> str:
    """The title with its first letter in upper case."""
    return title[0].upper() + title[1:]


def number(value: float | None, digits: int) -> str:
    """Fixed point."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as a percentage with one digit."""
    return "–" if value is None else f"{100 * value:.1f}%"


def ratio(found: Interval | None) -> str:
    """`1.52 (1.40–1.66)`."""
    if found is None:
        return "–"
    ends = "" if found.low is None or found.high is None else f" ({found.low:.2f}–{found.high:.2f})"
    return f"{found.value:.2f}{ends}"


def difference(found: Interval | None, digits: int = 1) -> str:
    """`+0.3 (-0.5 to +1.1)`."""
    if found is None:
        return "–"
    known = found.low is not None and found.high is not None
    ends = f" ({found.low:+.{digits}f} to {found.high:+.{digits}f})" if known else ""
    return f"{found.value:+.{digits}f}{ends}"


def approximate(value: float | None) -> str:
    """A count to two significant digits: 1,300."""
    return "–" if value is None else f"{float(f'{value:.2g}'):,.0f}"
