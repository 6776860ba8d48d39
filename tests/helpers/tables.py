"""Reads the tables of reports."""

from __future__ import annotations


def rows_of(text: str) -> list[dict[str, str]]:
    """The rows of a markdown table, by column."""
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]
