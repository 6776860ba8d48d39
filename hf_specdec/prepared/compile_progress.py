"""A line on stderr while a step is compiled: which step, how many of its segments, how long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers.utils import logging

_disabled: ContextVar[bool] = ContextVar("disable_tqdm", default=False)


@contextmanager
def tqdm_disabled(disable: bool) -> Iterator[None]:
    """Show no progress in the block if `disable`."""
    before = _disabled.set(disable)
    try:
        yield
    finally:
        _disabled.reset(before)


def progress_bar(step: str, segments: int) -> Any:
    """A bar of tqdm over a step's segments; silent without any, and where transformers' progress bars are off."""
    return logging.tqdm(
        total=segments, desc=f"Compiling {step}", unit=" segments", disable=not segments or _disabled.get()
    )
