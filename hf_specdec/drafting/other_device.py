"""A draft on a different device from the target: it sends tokens, not logits, and can draft while the target verifies.

Work on an accelerator is asynchronous. Between queuing the verification and reading its result, a draft on the CPU
has time to start on the next round; its drafts are used if the verification accepts what they were built on.
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
from hf_specdec.rules.statistics import Round


def is_on_other_device(draft: torch.device, target: torch.device, processors: HostProcessors) -> bool:
    """Whether a draft works on a device of its own, where it can process its scores as well."""
    return draft != target and processors.portable


def can_draft_ahead(draft: torch.device, target: torch.device, rows: int) -> bool:
    """Whether such a draft can work while the target verifies: on the CPU, under an accelerator, for a single row."""
    return rows == 1 and draft.type == "cpu" and target.type != "cpu"


@dataclass(frozen=True)
class AheadDraft:
    """Drafts made before the text that they follow was known.

    Args:
        start: tokens of the text as it was known.
        assumed: the tokens taken to follow: the round's drafts, and the draft's guess at the target's own.
        limit: the most tokens that could be drafted then.
        drafts: what was drafted after them, on the draft's device.
    """

    start: int
    assumed: list[int]
    limit: int
    drafts: DraftProposal

    def came_true(self, ids: Tensor, lengths: Sequence[int]) -> bool:
        """Whether the text of the one row in `ids` `[1, N]` is what was assumed."""
        end = self.start + len(self.assumed)
        return lengths[0] == end and ids[0, self.start : end].tolist() == self.assumed

    def first(self, count: int) -> DraftProposal:
        """The first `count` of the drafts at most; they have cost this round no pass."""
        tokens, probs = self.drafts.tokens[:, :count], self.drafts.probs
        return DraftProposal(tokens, (tokens.shape[1],), None if probs is None else probs[:, :count])


class OtherDeviceDrafter(ModelDrafter):
    """Drafts on the draft's own device and sends a whole round's proposal to the target's.

    With a single row it can also draft ahead: while the target verifies, it assumes that every draft is accepted,
    guesses the target's own token, and drafts on from there. (Several rows would all have to be guessed right at
    once.) The guess is the draft's most probable token, also in sampling, where that is right at least as often as
    a draw: max q ≥ Σ q². Whether drafts made ahead are used depends only on the text before them, and they come
    from the distributions that are returned with them, so the acceptance rules stay lossless.

    Args:
        runner, processors, rule, settings: see `ModelDrafter`; the processors are `portable`.
        device: the draft's.
        pays: says whether to draft ahead; None: never.
    """

    def __init__(self, *args: Any, device: torch.device, pays: AheadPayoff | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.device = device
        self.pays = pays
        self._last: tuple[int, int, DraftProposal] | None = None  # the text's length, the room, what was drafted
        self._ahead: AheadDraft | None = None

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """See `Drafter.propose`."""
        made, self._ahead, self._last = self._ahead, None, None
        limit = self._limit(lengths, room)
        # A rule that wants more by now gets all of it from the start.
        if made is None or not 0 < limit <= made.limit or not made.came_true(ids, lengths):
            return super().propose(ids, lengths, room)
        return self._delivered(made.first(limit), ids, lengths, room)

    def ahead(self) -> int:
        """See `Drafter.ahead`."""
        if self.pays is None or not self.pays.worth_it or self._last is None:
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
        """See `Drafter.observe`."""
        super().observe(finished)
        if self.pays is not None:
            self.pays.observe(finished)

    def _draft(
        self, ids: Tensor, tokens: Tensor, lengths: Sequence[int], room: Sequence[int], limit: int
    ) -> DraftProposal:
        tokens = sent(tokens, self.device)
        # The processors read no text, so that a place for the drafts alone is text enough.
        drafted = super()._draft(tokens.new_zeros(len(tokens), limit), tokens, [0] * len(tokens), room, limit)
        return self._delivered(drafted, ids, lengths, room)

    def _delivered(
        self, drafted: DraftProposal, ids: Tensor, lengths: Sequence[int], room: Sequence[int]
    ) -> DraftProposal:
        """What was drafted, on the device of `ids` and written there."""
        self._last = lengths[0], room[0], drafted
        tokens = sent(drafted.tokens, ids.device)
        return replace(drafted, tokens=tokens, probs=None if drafted.probs is None else sent(drafted.probs, ids.device))

    def _guess(self, last: Tensor, length: int) -> Tensor:
        """`[1, 1]`: the draft's most probable token after `length` tokens, the `last` `[1, 1]` of them read for it."""
        self.runner.rewind([length - 1])
        logits = self.runner.forward(last, 1)[:, -1]
        self._read = list(self.runner.read)
        return self._choose(last, [0], logits, [0], None)[1].unsqueeze(1)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device, which is not waited for where it is a GPU: CUDA takes pageable memory at once."""
    return tensor.to(device, non_blocking=device.type == "cuda")
