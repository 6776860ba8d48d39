"""Shared decisions for processes that hold one model together (tensor parallel): the first process decides for all.

All processes must run the same passes over the same tokens. Their scores are equal, but draws and clocks are not. A
single process sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from hf_specdec.rules.round_statistics import Round

_group: ContextVar[Any] = ContextVar("hf_specdec_group", default=None)
TIMES = ("draft_seconds", "verify_seconds", "seconds", "catch_up_seconds")


@contextmanager
def among(group: distributed.ProcessGroup | None) -> Iterator[None]:
    """Share decisions among the processes of a group within the block; None for a single process."""
    before = _group.get()
    try:
        _group.set(group)
        yield
    finally:
        _group.set(before)


def shared(decision: Tensor) -> Tensor:
    """Return the first process's tensor in all processes; shapes must be equal."""
    group = _group.get()
    if group is None:
        return decision
    sent = decision.contiguous().clone()
    distributed.broadcast(sent, group=group, group_src=0)
    return sent


def with_shared_times(finished: Round) -> Round:
    """Replace a round's times by the first process's, since automatic lengths depend on them."""
    if _group.get() is None:
        return finished
    # Process groups of GPUs cannot send tensors on a CPU.
    device = torch.device("cuda" if distributed.get_backend(_group.get()) == "nccl" else "cpu")
    times = torch.tensor([getattr(finished, name) for name in TIMES], dtype=torch.float32, device=device)
    return replace(finished, **dict(zip(TIMES, shared(times).tolist(), strict=True)))
