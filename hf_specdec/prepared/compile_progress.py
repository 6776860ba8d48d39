"""A progress line on stderr during compilation."""

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
    before = _disabled.get()
    try:
        _disabled.set(disable)
        yield
    finally:
        _disabled.set(before)


def progress_bar(what: str, parts: int) -> Any:
    """A tqdm bar over the parts to compile; silent if there are none, or if transformers' bars are disabled."""
    return logging.tqdm(total=parts, desc=f"Compiling {what}", unit=" parts", disable=not parts or _disabled.get())
