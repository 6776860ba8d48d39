"""The processor's properties, as reported by the system."""

from __future__ import annotations

import platform
from pathlib import Path


def reported(name: str) -> str:
    """The first core's entry in /proc/cpuinfo; if there is none, Python's name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name)
    return next(found, platform.processor())


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(reported("flags").split())
