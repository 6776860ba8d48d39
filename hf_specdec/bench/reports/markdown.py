"""How tables and figures are written; – stands for a figure that is not defined."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hf_specdec.bench.records import Interval

# How a cell with a figure begins, or one without; for the alignment of its column.
_FIGURE = re.compile(r"[*+-]*\d|–|$")


def table(rows: Sequence[dict[str, str]]) -> str:
    """A markdown table of rows by column; columns of figures are aligned right, others left, and always the first."""
    import pandas as pd  # here, since a run without tables does without it

    frame = pd.DataFrame(rows).map(lambda cell: cell.replace("|", "\\|"))
    right = [place > 0 and all(map(_FIGURE.match, frame[name])) for place, name in enumerate(frame)]
    align = ["right" if one else "left" for one in right]
    return str(frame.to_markdown(index=False, disable_numparse=True, colalign=align if len(frame) else None))


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


def points(found: Interval | None, digits: int = 1) -> str:
    """A difference: `+0.3 (-0.5 to +1.1)`."""
    if found is None:
        return "–"
    known = found.low is not None and found.high is not None
    ends = f" ({found.low:+.{digits}f} to {found.high:+.{digits}f})" if known else ""
    return f"{found.value:+.{digits}f}{ends}"


def approximate(value: float | None) -> str:
    """A count to two significant digits: 1,300."""
    return "–" if value is None else f"{float(f'{value:.2g}'):,.0f}"


def size(parameters: int | None) -> str:
    """A count of parameters with its unit."""
    if parameters is None:
        return "–"
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def bullets(lines: Sequence[str]) -> str:
    """A list."""
    return "\n".join(f"- {line}" for line in lines)
