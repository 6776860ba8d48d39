"""Markdown for tables and figures; – means that a figure is not defined."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hf_specdec.bench.records import Interval

# The start of a cell with a figure, or an empty one; such columns are aligned right.
_FIGURE = re.compile(r"[*+-]*\d|–|$")


def table(rows: Sequence[dict[str, str]]) -> str:
    """A markdown table; columns of figures are aligned right, others and the first one left."""
    import pandas as pd  # imported here, since a run without tables doesn't need it

    frame = pd.DataFrame(rows).map(lambda cell: cell.replace("|", "\\|"))
    right = [place > 0 and all(map(_FIGURE.match, frame[name])) for place, name in enumerate(frame)]
    align = ["right" if one else "left" for one in right]
    return str(frame.to_markdown(index=False, disable_numparse=True, colalign=align if len(frame) else None))


def capital(title: str) -> str:
    """The title with its first letter in upper case."""
    return title[0].upper() + title[1:]


def number(value: float | None, digits: int) -> str:
    """A number with a fixed number of decimals."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as a percentage with one decimal."""
    return "–" if value is None else f"{100 * value:.1f}%"


def ratio(found: Interval | None) -> str:
    """A ratio with its interval: `1.52 (1.40–1.66)`."""
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
    """A count with two significant digits: 1,300."""
    return "–" if value is None else f"{float(f'{value:.2g}'):,.0f}"


def size(parameters: int | None) -> str:
    """A number of parameters with its unit: 162.8M."""
    if parameters is None:
        return "–"
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def bullets(lines: Sequence[str]) -> str:
    """A markdown list."""
    return "\n".join(f"- {line}" for line in lines)
