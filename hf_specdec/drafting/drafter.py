"""The `Drafter` protocol, its proposals, and a base class that also works in transformers' assisted loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation import CandidateGenerator

from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.relaxations import CertainWhereKept
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.rules.round_statistics import Round


@dataclass(frozen=True)
class DraftProposal:
    """A round's drafts.

    Args:
        tokens: `[B, γ]` on the target's device; positions past a row's length are arbitrary valid tokens.
        lengths: the number of drafted tokens per row.
        probs: `[B, γ, V]`, the distributions that the tokens were drawn from; None for point masses.
        steps: the number of forward passes of the draft.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    probs: Tensor | None = None
    steps: int = 0


@dataclass(frozen=True)
class Copies:
    """A round's copies, and the rows in which the model drafts.

    Args:
        tokens: the copied tokens of each row.
        modelled: the rows in which the model drafts.
        width: the lookahead of the round if the model drafts in none.
    """

    tokens: Sequence[Sequence[int]]
    modelled: Collection[int]
    width: int


@dataclass(frozen=True)
class PreparedDrafting:
    """How prepared rounds make a drafter's drafts: by passes of one model, one token each, and by copies.

    Args:
        rule: the rule that ends drafts.
        runner: runs the draft; None if nothing is drafted.
        vocabulary, draft_vocabulary, keep_probs, max_positions: see `ModelDrafter`.
        resume: continues after prepared rounds, given how many tokens of each row the draft has read.
        choose: chooses copies, given the arguments of `Drafter.propose` and whether rounds of a lookahead are
            prepared. None if the model always drafts.
    """

    rule: StopRule
    runner: Any = None
    vocabulary: int = 0
    draft_vocabulary: int = 0
    keep_probs: bool = False
    max_positions: int | None = None
    resume: Callable[[Sequence[int]], None] = lambda read: None
    choose: Callable[[Tensor, Sequence[int], Sequence[int], Callable[[int], bool]], Copies] | None = None


class Drafter(Protocol):
    """The interface between the decoding loop and a drafter."""

    @property
    def states(self) -> HiddenStates | None:
        """The target's hidden states that it reads, without which it cannot draft in the first round; else None."""

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """Draft after each row's text.

        Args:
            ids: `[B, N]`, left-aligned texts followed by spare space. If there are processors that read the text, the
                drafts are also written there.
            lengths: the number of tokens in each row.
            room: the most tokens that may be drafted for each row; 0 for rows that have ended.
        """

    def retain(self, rows: Sequence[int]) -> None:
        """Called before each round: only `rows` will be drafted for from now on."""

    def observe(self, finished: Round) -> None:
        """Learn from a finished round."""

    def for_prepared_rounds(self) -> PreparedDrafting | None:
        """How prepared rounds can draft in its place; None if they cannot."""

    def runners(self) -> list[Any]:
        """The runners of its models, whose passes may be compiled or captured."""


class BaseDrafter(CandidateGenerator):
    """Base class of drafters: holds the stop rule and adapts `propose` to transformers' assisted loop.

    Args:
        rule: the rule that ends drafts.
        max_length: the maximum length of a row, used by `get_candidates`.
        rollback: the relaxation that `get_candidates` passes the proposal to, in transformers' loop.
    """

    def __init__(self, rule: StopRule, *, max_length: int = 0, rollback: CertainWhereKept | None = None) -> None:
        self.rule = rule
        self.max_length = max_length
        self.rollback = rollback

    @property
    def states(self) -> HiddenStates | None:
        """No hidden states."""
        return None

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """Draft up to `room` tokens for each row; defined by subclasses."""
        raise NotImplementedError

    def retain(self, rows: Sequence[int]) -> None:
        """Draft for `rows` only from now on."""

    def observe(self, finished: Round) -> None:
        """Let the stop rule learn from a finished round."""
        self.rule.observe(finished)

    def for_prepared_rounds(self) -> PreparedDrafting | None:
        """None by default: prepared rounds replace only drafters that support them."""
        return None

    def runners(self) -> list[Any]:
        """No runners by default."""
        return []

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """`CandidateGenerator.get_candidates` for batch size 1: the text with its drafts, and their log-probabilities.

        The log-probabilities are None for empty drafts and point masses, as transformers' rules expect.
        """
        length = input_ids.shape[1]
        room = self.max_length - length - 1
        ids = torch.cat([input_ids, input_ids.new_zeros(1, max(min(self.rule.limit, room), 0))], dim=1)
        proposal = self.propose(ids, [length], [room])
        drafted = proposal.lengths[0]
        write_drafts(ids, [length], proposal.tokens, proposal.lengths)
        if self.rollback is not None:
            self.rollback.hold(length, proposal.tokens[0, :drafted].tolist())
        logits = proposal.probs[:, :drafted].log() if proposal.probs is not None and drafted else None
        return ids[:, : length + drafted], logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """`CandidateGenerator.update_candidate_strategy`: calls `observe`, without times."""
        drafted = scores.shape[1] - 1
        overlap = (float(num_matches),)
        self.observe(
            Round((drafted,), (num_matches,), (num_matches + 1,), overlap, drafted, scores.shape[1], 0.0, 0.0, 0.0)
        )


class NoDrafter(BaseDrafter):
    """Propose nothing: plain decoding in the same loop, as a baseline."""

    def __init__(self) -> None:
        super().__init__(StopRule(0))

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """An empty draft."""
        return no_drafts(ids)

    def for_prepared_rounds(self) -> PreparedDrafting:
        """Prepared rounds without drafts."""
        return PreparedDrafting(self.rule)


def write_drafts(ids: Tensor, lengths: Sequence[int], tokens: Tensor, counts: Sequence[int]) -> None:
    """Write the first `counts` drafts of each row of `tokens` `[B, γ]` after its text in `ids` `[B, N]`."""
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if count:
            ids[row, length : length + count] = tokens[row, :count]


def no_drafts(ids: Tensor) -> DraftProposal:
    """An empty proposal for the rows of `ids`."""
    return DraftProposal(ids.new_zeros(len(ids), 0), (0,) * len(ids))


def usable(tokens: list[int], vocabulary: int, eos_tokens: frozenset[int]) -> list[int]:
    """Cut copied tokens after the first EOS, or before the first token outside the vocabulary."""
    for position, token in enumerate(tokens):
        if not 0 <= token < vocabulary:
            return tokens[:position]
        if token in eos_tokens:
            return tokens[: position + 1]
    return tokens


def point_masses(
    ids: Tensor, lengths: Sequence[int], found: Sequence[Sequence[int]], processors: HostProcessors | None
) -> DraftProposal:
    """A proposal of each row's `found` tokens; if any processors read the text, also written to `ids`."""
    longest = max(map(len, found))
    if longest == 0:
        return no_drafts(ids)
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in found], device=ids.device)
    counts = tuple(map(len, found))
    if processors is not None and not processors.scores_only:
        write_drafts(ids, lengths, tokens, counts)
    return DraftProposal(tokens, counts)


def last_tokens(ids: Tensor, lengths: Sequence[int], count: int) -> Tensor:
    """`[B, count]`: the last `count` tokens of left-aligned texts of the given lengths."""
    if min(lengths) == max(lengths):
        return ids[:, lengths[0] - count : lengths[0]]
    first = torch.tensor([n - count for n in lengths], device=ids.device).unsqueeze(1)
    return ids.gather(1, first + torch.arange(count, device=ids.device))
