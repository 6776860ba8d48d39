"""The decoding loop: draft, verify, accept, commit, roll back. Works with any drafter, rule and relaxation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_specdec.drafting.drafter import Drafter, DraftProposal, last_tokens
from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.relaxations import Relaxation
from hf_specdec.host.torch_threads import fitting_threads
from hf_specdec.host.transcript import Transcript
from hf_specdec.models.runner_choice import Runner
from hf_specdec.rules import sampling
from hf_specdec.rules.round_statistics import Round, SpeculationStats, reached_overlap
from hf_specdec.rules.shared_decisions import shared, with_shared_times
from hf_specdec.rules.verification import Rule, Verification


@dataclass(frozen=True)
class Settled:
    """The outcome of verifying a proposal. Tuples hold one entry per row.

    Args:
        accepted, new_tokens, overlap, width: see `Round`.
        seconds: from the start of the pass until the result is known on the host.
        seconds_shown: time spent in criteria and the streamer within the round.
    """

    accepted: tuple[int, ...]
    new_tokens: tuple[int, ...]
    overlap: tuple[float, ...]
    width: int
    seconds: float
    seconds_shown: float = 0.0


class Rounds(Protocol):
    """A way to make rounds: the general one of `Decoder`, or another with the same results."""

    @property
    def mode(self) -> Callable[[], AbstractContextManager[Any]]:
        """The context manager for a round."""

    def make_round(self, transcript: Transcript) -> Round:
        """Draft, verify, accept and commit once."""


@dataclass(frozen=True)
class Decoder:
    """The parts that a round needs, and the general way to make one. `decode` makes rounds until all rows have ended.

    Args:
        target: runs the target model.
        drafter: proposes tokens.
        processors: the caller's logits processors, applied to the target's scores.
        relaxation: relaxes the target's processed scores; None is lossless.
        rule: the verification rule.
        do_sample: whether the rule needs probabilities and uniform draws.
        mode: the context manager for a round, see `traits.pass_mode`.
        max_positions: the target's context length, which drafts must not exceed; None if it is unlimited.
        drafts_in_first_round: whether to draft right after the prompt. Must be False if a row's last prompt token is
            masked, since eager attention spreads such a query evenly over all keys, including those of drafts; if the
            prompt has images or audio, since a drafted placeholder would be taken for one of theirs; and if the model
            prepares the chunks of a chunked prompt itself, which may depend on a chunk's length.
    """

    target: Runner
    drafter: Drafter
    processors: HostProcessors
    relaxation: Relaxation | None
    rule: Rule
    do_sample: bool
    mode: type[torch.inference_mode] | type[torch.no_grad]
    max_positions: int | None
    drafts_in_first_round: bool

    def decode(self, transcript: Transcript, stats: SpeculationStats, rounds: Rounds | None = None) -> None:
        """Decode until every row has ended, and append each round to `stats`.

        Afterwards, even if an exception was raised, the cache holds all shown tokens except the last, as after plain
        `generate`. If rows ended at different lengths, it holds the tokens of the shortest row's length; continuing
        from the cache reads the rest, padding included, again.
        """
        rounds = rounds or self
        try:
            with fitting_threads(transcript.ids.device) as fit:
                while not transcript.finished:
                    with rounds.mode():
                        stats.rounds.append(with_shared_times(rounds.make_round(transcript)))
                    fit()
                    self.drafter.observe(stats.rounds[-1])
                    transcript.show()
        finally:
            # Only once, at the end: after a sliding window has dropped tokens, it can't be rolled back again.
            self.target.end(self.kept_length(transcript))

    def kept_length(self, transcript: Transcript) -> int:
        """The number of tokens that the returned cache holds.

        0 if rows have ended in different stages: the missing tokens would be read with other rotary frequencies.
        """
        stages, length = self.target.stages, transcript.common_length - 1
        return length if stages is None or stages.agree(length, max(transcript.lengths) - 1) else 0

    def make_round(self, transcript: Transcript) -> Round:
        """Draft, verify, accept and commit once for all open rows; every step runs eagerly or replays a recording."""
        began = perf_counter()
        lengths, room = list(transcript.lengths), transcript.room
        open_rows = [row for row, space in enumerate(room) if space > 0]
        going, most = self._going(open_rows, lengths)
        self.target.rewind([n - 1 for n in lengths])
        if not self.drafts_in_first_round and min(lengths) == transcript.prompt_length:
            most = 0
        room = [int(max(min(space - 1, most), 0)) if row in going else 0 for row, space in enumerate(room)]
        proposal = self.drafter.propose(transcript.ids, lengths, room)
        drafted = perf_counter()
        unread = max(n - read for n, read in zip(lengths, self.target.read, strict=True))
        if self.target.stages is not None:
            aside = [row for row in range(len(lengths)) if row not in going]
            longest = max(lengths[row] for row in going) + proposal.tokens.shape[1]
            self.target.set_aside(aside, self.target.stages.last_position(longest))
        settled = self._settle(transcript, last_tokens(transcript.ids, lengths, unread), proposal, going)
        return Round(
            drafted=proposal.lengths,
            accepted=settled.accepted,
            new_tokens=settled.new_tokens,
            overlap=settled.overlap,
            draft_steps=proposal.steps,
            width=settled.width,
            draft_seconds=drafted - began,
            verify_seconds=settled.seconds,
            seconds=perf_counter() - began - settled.seconds_shown,
            room=tuple(room),
            settled=self.target.settled,
        )

    def _settle(self, transcript: Transcript, unread: Tensor, proposal: DraftProposal, going: Sequence[int]) -> Settled:
        """Verify a proposal after the `unread` tokens `[B, k]` of the texts, and add kept tokens to the transcript."""
        began = perf_counter()
        tokens = torch.cat([unread, proposal.tokens], dim=1)
        verified, recorded = self._verify(transcript, tokens, proposal, going)
        # One copy from device to host per round. float32 represents every token id below 2^24 exactly.
        decided = torch.stack([verified.n_accepted, verified.next_token], dim=1)
        answers = shared(torch.cat([decided, verified.overlap, proposal.tokens], dim=1)).tolist()
        seconds = perf_counter() - began
        accepted = tuple(int(n) for n, *_ in answers)
        lookahead = proposal.tokens.shape[1]
        new_tokens = [
            [*map(int, answer[2 + lookahead :][:n]), int(answer[1])] if row in going else []
            for row, (n, answer) in enumerate(zip(accepted, answers, strict=True))
        ]
        kept = transcript.append(new_tokens)
        for kind, values in recorded.items():
            transcript.record(kind, values, kept)
        overlap = tuple(
            reached_overlap(row[2:], n, drafted)
            for row, n, drafted in zip(answers, accepted, proposal.lengths, strict=True)
        )
        return Settled(accepted, kept, overlap, tokens.shape[1], seconds)

    def _going(self, open_rows: Sequence[int], lengths: Sequence[int]) -> tuple[Sequence[int], float]:
        """The rows that take part in a round, and the most drafts that fit into its pass.

        A pass has the same width for all rows, so the longest row decides. Rows at the end of a stage wait for the
        others.
        """
        stages, going, most = self.target.stages, open_rows, math.inf
        if stages is not None:
            going, most = stages.going(open_rows, lengths)
        fed = self.target.retain(open_rows if stages is None else sorted({*open_rows, stages.longest_row}))
        self.drafter.retain(open_rows)
        if self.max_positions is not None:
            most = min(most, self.max_positions - max(lengths[row] for row in fed))
        return going, most

    def _verify(
        self, transcript: Transcript, tokens: Tensor, proposal: DraftProposal, open_rows: Sequence[int]
    ) -> tuple[Verification, dict[str, Tensor]]:
        """Run the target over `tokens` `[B, k]`, the unread tokens and the drafts, and verify the drafts.

        At most three tensors of size `[B, γ+1, V]` exist at once, including the draft probabilities.

        Returns:
            The verification, and the "scores" and "logits" `[B, γ+1, V]` that the transcript records.
        """
        ids, lookahead = transcript.ids, proposal.tokens.shape[1]
        # Copies between host and device come before the pass: after it they would wait for the accelerator.
        draft_lengths = torch.tensor(proposal.lengths, device=ids.device)
        scores_only = self.processors.scores_only
        counts = [] if scores_only else self._processed_counts(transcript, proposal, open_rows)
        logits = self.target.forward(tokens, lookahead + 1)
        recorded = {"logits": logits} if transcript.keeps_logits else {}
        # Custom processors may write to the scores in place, so they get a copy.
        scores = logits.to(ids.device, torch.float32, copy=not scores_only)
        del logits
        if self.processors:
            scores = self.processors(ids, transcript.lengths, counts, scores)
            self.processors.end_round()
        if transcript.records:
            recorded["scores"] = scores
        if self.relaxation is not None and lookahead:
            scores = self.relaxation.relax(scores, proposal.tokens, draft_lengths, proposal.probs)
        uniforms = None
        if self.do_sample:
            scores = sampling.probabilities(scores)
            uniforms = sampling.uniforms(*scores.shape[:2], device=ids.device)
        verified = self.rule(scores, proposal.tokens, draft_lengths, proposal.probs, uniforms)
        return verified, recorded

    def _processed_counts(self, transcript: Transcript, proposal: DraftProposal, open_rows: Sequence[int]) -> list[int]:
        """The number of positions to process per row: those whose text plain `generate` could reach.

        Processing stops after a drafted EOS, and at a draft that a `prefix_allowed_tokens_fn` forbids.
        """
        counts = [0] * len(proposal.lengths)
        drafts = proposal.tokens.tolist()
        for row in open_rows:
            drafted = drafts[row][: proposal.lengths[row]]
            text = transcript.ids[row, : transcript.lengths[row]]
            ends = bool(drafted) and drafted[-1] in transcript.eos_tokens
            counts[row] = min(len(drafted) + 1 - ends, self.processors.allowed(row, text, drafted) + 1)
        return counts
