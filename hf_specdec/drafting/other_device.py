"""A draft on another device than the target: only tokens are transferred, and it can draft while the target verifies.

Accelerators run asynchronously. Between queuing the verification and reading its result, a draft on the CPU has time to
start the next round. Its drafts are used if the verification confirms the tokens that they follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_specdec.drafting.ahead_payoff import AheadPayoff
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.host.processors import HostProcessors
from hf_specdec.rules.round_statistics import Round


def is_on_other_device(draft: torch.device, target: torch.device, processors: HostProcessors) -> bool:
    """Whether the draft is on another device than the target, and can also run the processors there."""
    return draft != target and processors.portable


def can_draft_ahead(draft: torch.device, target: torch.device, rows: int) -> bool:
    """Whether the draft can run while the target verifies: draft on the CPU, target on an accelerator, a single row."""
    return rows == 1 and draft.type == "cpu" and target.type != "cpu"


@dataclass(frozen=True)
class AheadDraft:
    """Drafts that follow tokens not yet confirmed by the target.

    Args:
        start: the length of the confirmed text.
        assumed: the tokens assumed to follow: the round's drafts, and the draft's guess of the target's next token.
        limit: the most tokens that could be drafted at that time.
        drafts: the drafts after the assumed tokens, on the draft's device.
    """

    start: int
    assumed: list[int]
    limit: int
    drafts: DraftProposal

    def matches(self, ids: Tensor, lengths: Sequence[int]) -> bool:
        """Whether the text in `ids` `[1, N]` continued as assumed."""
        end = self.start + len(self.assumed)
        return lengths[0] == end and ids[0, self.start : end].tolist() == self.assumed

    def first(self, count: int) -> DraftProposal:
        """At most the first `count` drafts, with 0 steps: their passes were counted in the round that made them."""
        tokens, probs = self.drafts.tokens[:, :count], self.drafts.probs
        return DraftProposal(tokens, (tokens.shape[1],), None if probs is None else probs[:, :count])


class OtherDeviceDrafter(ModelDrafter):
    """Draft on the draft's device, and transfer the proposal of a whole round to the target's.

    With a single row, this can also draft ahead: while the target verifies, assume that every draft is accepted, guess
    the target's next token, and continue from there. With several rows, all guesses would have to be right at once.
    The guess is the draft's most probable token. In sampling, that matches at least as often as a draw would:
    max q ≥ Σ q². Whether drafts made ahead are used depends only on the text before them, and they were drawn from the
    distributions that are returned with them, so verification stays lossless.

    Args:
        runner, processors, rule, settings: see `ModelDrafter`. The processors must be `portable`.
        device: the draft's device.
        payoff: decides whether to draft ahead; None to never do so.
    """

    def __init__(self, *args: Any, device: torch.device, payoff: AheadPayoff | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.device = device
        self.payoff = payoff
        self._last: tuple[int, int, DraftProposal] | None = None  # the text's length, the room, the proposal
        self._ahead: AheadDraft | None = None

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """Return the drafts made ahead if the text continued as assumed; otherwise draft."""
        made, self._ahead, self._last = self._ahead, None, None
        limit = self._limit(lengths, room)
        # If the rule now allows more tokens than could be drafted ahead, draft again.
        if made is None or not 0 < limit <= made.limit or not made.matches(ids, lengths):
            return super().propose(ids, lengths, room)
        return self._on_target_device(made.first(limit), ids, lengths, room)

    def ahead(self) -> int:
        """Draft what follows the last proposal while the target verifies it, and return the number of passes."""
        if self.payoff is None or not self.payoff.worth_it or self._last is None:
            return 0
        length, room, last = self._last
        drafts = last.tokens[0].tolist()
        end, room = length + len(drafts), room - len(drafts) - 1
        limit = self._limit([end + 1], [room])
        if limit <= 0 or not drafts or drafts[-1] in self.eos_tokens:
            return 0
        guess = self._guess(last.tokens[:, -1:], end)
        token = int(guess)
        if token in self.eos_tokens:
            return 1
        made = super()._draft(guess.new_zeros(1, limit), guess, [0], [room], limit)
        self._read = list(self.runner.read)
        self._ahead = AheadDraft(length, [*drafts, token], limit, made)
        return 1 + made.steps

    def observe(self, finished: Round) -> None:
        """Learn from a finished round whether drafting ahead saves time."""
        super().observe(finished)
        if self.payoff is not None:
            self.payoff.observe(finished)

    def _draft(
        self, ids: Tensor, tokens: Tensor, lengths: Sequence[int], room: Sequence[int], limit: int
    ) -> DraftProposal:
        tokens = sent(tokens, self.device)
        # The processors don't read the text, so a buffer for the drafts can stand in for it.
        drafted = super()._draft(tokens.new_zeros(len(tokens), limit), tokens, [0] * len(tokens), room, limit)
        return self._on_target_device(drafted, ids, lengths, room)

    def _on_target_device(
        self, drafted: DraftProposal, ids: Tensor, lengths: Sequence[int], room: Sequence[int]
    ) -> DraftProposal:
        """Remember a proposal for `ahead`, and transfer it to the device of `ids`."""
        self._last = lengths[0], room[0], drafted
        tokens = sent(drafted.tokens, ids.device)
        return replace(drafted, tokens=tokens, probs=None if drafted.probs is None else sent(drafted.probs, ids.device))

    def _guess(self, last: Tensor, length: int) -> Tensor:
        """`[1, 1]`: the draft's most probable token after `length` tokens; reads the last of them, `last` `[1, 1]`."""
        self.runner.rewind([length - 1])
        logits = self.runner.forward(last, 1)[:, -1]
        self._read = list(self.runner.read)
        return self._choose(last, [0], logits, [0], None)[1].unsqueeze(1)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device`, to CUDA without waiting: it stages pageable memory before the call returns."""
    return tensor.to(device, non_blocking=device.type == "cuda")
