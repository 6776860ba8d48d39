"""Reports: sections of markdown with embedded pictures."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hf_specdec.bench.records import Result

_PACKAGES = ("pandas", "scipy", "tabulate")


@dataclass(frozen=True)
class Picture:
    """A picture of a report.

    Args:
        name: the end of the file's name.
        drawn_by: `module.function` of `reports.pictures`, imported when the report is written; it returns None if
            there is too little to draw.
        arguments: the function's arguments.
    """

    name: str
    drawn_by: str
    arguments: tuple[Any, ...]


Block = str | Picture
# Maps a result to its blocks in order; empty ones are left out.
Render = Callable[[Result], "list[Block]"]


def section(title: str, *blocks: Block) -> list[Block]:
    """Blocks under a title; none if the last block, the section's content, is empty."""
    return [f"## {title}", *blocks] if blocks[-1] else []


def document(result: Result, name: str, render: Render) -> tuple[str, dict[str, bytes]]:
    """The report's text, and its pictures as PNG by file name.

    For a synthetic pair, every title says that acceptance is imposed. Without pandas, scipy and tabulate the text is
    only a line on how to render it later; without matplotlib there are no pictures.

    Args:
        name: the name of the report's file, without suffix.
    """
    if missing := [package for package in _PACKAGES if find_spec(package) is None]:
        text = (
            f"No tables: {' and '.join(missing)} not installed. `pip install 'hf_specdec[bench]'`, then "
            "`scripts/assisted_generation.py --task report --output_dir DIR` renders the JSON in DIR.\n"
        )
        return text, {}
    note = title_note(result)
    parts, pictures = [], {}
    for block in render(result):
        if isinstance(block, Picture):
            if find_spec("matplotlib") is not None and (found := _drawn(block, note)):
                pictures[f"{name}-{block.name}.png"] = found[1]
                parts.append(f"![{found[0]}]({name}-{block.name}.png)")
        elif block:
            parts.append(re.sub(r"^(#+ .*)$", rf"\1 ({note})", block, flags=re.MULTILINE) if note else block)
    return "\n\n".join(parts) + "\n", pictures


def title_note(result: Result) -> str | None:
    """A note on synthetic models for every title; None for pairs with trained weights."""
    return "synthetic pair, acceptance imposed" if result.synthetic else None


def _drawn(picture: Picture, note: str | None) -> tuple[str, bytes] | None:
    """The picture's title and PNG."""
    from hf_specdec.bench.reports.pictures.drawing import png  # imported here since it takes a second

    module, function = picture.drawn_by.split(".")
    figure = getattr(import_module(f"hf_specdec.bench.reports.pictures.{module}"), function)(*picture.arguments)
    if figure is None:
        return None
    title = figure.get_suptitle()
    if note:
        figure.suptitle(f"{title}\n({note})")
    return title, png(figure)
