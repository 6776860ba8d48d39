"""Processes that hold one model together (tensor parallel) decide once: the first does, the others take it over.

Each has to make the same passes over the same tokens. Scores are the same in all of them, but draws and clocks are not.
Alone, nothing is sent.
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
    """Share decisions among the processes of a group; None: there is one process."""
    before = _group.get()
    try:
        _group.set(group)
        yield
    finally:
        _group.set(before)


def shared(decision: Tensor) -> Tensor:
    """The first process's tensor, of the same shape in all of them."""
    group = _group.get()
    if group is None:
        return decision
    sent = decision.contiguous().clone()
    distributed.broadcast(sent, group=group, group_src=0)
    return sent


def with_shared_times(finished: Round) -> Round:
    """A round with the first process's times, by which lengths may be chosen."""
    if _group.get() is None:
        return finished
    # Groups of GPUs can't send what is on a CPU.
    device = torch.device("cuda" if distributed.get_backend(_group.get()) == "nccl" else "cpu")
    times = torch.tensor([getattr(finished, name) for name in TIMES], dtype=torch.float32, device=device)
    return replace(finished, **dict(zip(TIMES, shared(times).tolist(), strict=True)))
