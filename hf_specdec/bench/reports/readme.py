"""The parts of a README that are taken from results, between markers that name them.

`<!-- summary -->`, `<!-- pays FOLDER … -->`, `<!-- speed PATH -->` and `<!-- picture PATH NAME -->` open a part, and
`<!-- /summary -->` and so on close it. FOLDER limits a table to the results that lie in it. PATH is a result's path
without its suffix, relative to the README; NAME is a picture of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports.summary import engine_rows, setting, summary_table
from hf_specdec.bench.reports.tables import methods

_PART = re.compile(r"(<!-- (summary|pays|speed|picture)((?: [^\s>]+)*) -->\n)(.*?)(<!-- /\2 -->)", re.DOTALL)


def filled(text: str, folder: Path, results: Mapping[Path, Result]) -> str:
    """A README with its parts taken from results.

    Args:
        text: of the README.
        folder: where the README lies.
        results: by path without suffix.

    Raises:
        KeyError: a part names a result that isn't there.
    """
    linked = {os.path.relpath(path, folder).replace(os.sep, "/"): result for path, result in results.items()}

    def part(match: re.Match[str]) -> str:
        start, kind, words, _, end = match.groups()
        return f"{start}{_PARTS[kind](linked, words.split())}\n{end}"

    return _PART.sub(part, text)


def has_parts(text: str) -> bool:
    """Whether a README takes anything from results."""
    return _PART.search(text) is not None


def _summary(linked: Mapping[str, Result], words: list[str]) -> str:
    return summary_table({f"{path}.md": result for path, result in linked.items()})


def _pays(linked: Mapping[str, Result], words: list[str]) -> str:
    listed = {path: result for path, result in linked.items() if not words or os.path.dirname(path) in words}
    return engine_rows({f"{path}.md": result for path, result in listed.items()})


def _speed(linked: Mapping[str, Result], words: list[str]) -> str:
    (path,) = words
    return f"{methods.speed_table(linked[path])}\n\n[Full report]({path}.md)"


def _picture(linked: Mapping[str, Result], words: list[str]) -> str:
    path, name = words
    return f"![Decoding speed, {setting(linked[path])}]({path}-{name}.png)"


_PARTS: Mapping[str, Callable[[Mapping[str, Result], list[str]], str]] = {
    "summary": _summary,
    "pays": _pays,
    "speed": _speed,
    "picture": _picture,
}
