"""What the system says of the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def reported(name: str) -> str:
    """An entry of /proc/cpuinfo, that of the first core; where there is none, the processor as Python names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name)
    return next(found, platform.processor())


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(reported("flags").split())
