"""Two chapters of Alice's Adventures in Wonderland (Lewis Carroll, 1865), for models that were trained on real text."""

from __future__ import annotations

from functools import cache
from pathlib import Path


def passage(number: int, of: int, *, chapter: int = 0) -> str:
    """A chapter (0 or 1), rotated to begin at one of `of` evenly spread paragraphs."""
    paragraphs = _chapters()[chapter]
    start = number % of * len(paragraphs) // of
    return "\n\n".join([*paragraphs[start:], *paragraphs[:start], ""])


@cache
def _chapters() -> list[list[str]]:
    text = Path(__file__).with_name("alice.txt").read_text(encoding="utf-8")
    return [chapter.strip().split("\n\n") for chapter in text.split("\n\n\n")]
