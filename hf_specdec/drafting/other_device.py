"""A draft on another device than the target: the tokens of a whole round are transferred at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.host.processors import HostProcessors


def is_on_other_device(draft: torch.device, target: torch.device, processors: HostProcessors) -> bool:
    """Whether the draft is on another device than the target, and can also run the processors there."""
    return draft != target and processors.portable


class OtherDeviceDrafter(ModelDrafter):
    """Draft on the draft's device, and transfer the proposal of a whole round to the target's.

    Args:
        runner, processors, rule, settings: see `ModelDrafter`. The processors must be `portable`.
        device: the draft's device.
    """

    def __init__(self, *args: Any, device: torch.device, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.device = device

    def _draft(
        self, ids: Tensor, tokens: Tensor, lengths: Sequence[int], room: Sequence[int], limit: int
    ) -> DraftProposal:
        tokens = sent(tokens, self.device)
        # The processors don't read the text, so a buffer for the drafts can stand in for it.
        drafted = super()._draft(tokens.new_zeros(len(tokens), limit), tokens, [0] * len(tokens), room, limit)
        probs = None if drafted.probs is None else sent(drafted.probs, ids.device)
        return replace(drafted, tokens=sent(drafted.tokens, ids.device), probs=probs)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device`, to CUDA without waiting: it stages pageable memory before the call returns."""
    return tensor.to(device, non_blocking=device.type == "cuda")
