"""The only loop: draft, verify, accept, commit, roll back; any batch size, any drafter, rule and relaxation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.drafting.drafter import Drafter, DraftProposal, last_tokens
from hf_specdec.host.processors import HostProcessors, Relaxation
from hf_specdec.host.transcript import Transcript
from hf_specdec.models.runner_choice import Runner
from hf_specdec.rules import sampling
from hf_specdec.rules.statistics import Round, SpeculationStats, reached_overlap
from hf_specdec.rules.verification import Rule, Verification


@dataclass(frozen=True)
class Decoder:
    """Everything a round needs; `decode` runs rounds until the transcript is finished.

    Args:
        target: feeds the target model.
        drafter: proposes tokens.
        processors: the host's, applied to the target's scores.
        relaxation: changes the target's processed scores; None is lossless.
        rule: accepts drafted tokens.
        do_sample: whether the rule needs probabilities and uniform draws.
        mode: how rounds are kept from recording gradients; see `runner.pass_mode`.
        max_positions: the target's own context; no pass goes beyond it with drafts. None where it has no bound.
    """

    target: Runner
    drafter: Drafter
    processors: HostProcessors
    relaxation: Relaxation | None
    rule: Rule
    do_sample: bool
    mode: type[torch.inference_mode] | type[torch.no_grad]
    max_positions: int | None

    def decode(self, transcript: Transcript, stats: SpeculationStats) -> None:
        """Decode until every row has ended; each round is added to `stats`.

        A cache then holds all but the last token shown, as plain `generate` leaves it, also after an exception.
        Where rows ended apart it ends with the shortest: the others' padding is read by whoever goes on from it.
        """
        try:
            while not transcript.finished:
                with self.mode():
                    stats.rounds.append(self._round(transcript))
                self.drafter.observe(stats.rounds[-1])
                transcript.show()
        finally:
            # Only now: a sliding window that has forgotten a round's drafts can't go back once more.
            self.target.end(transcript.common_length - 1)

    def _round(self, transcript: Transcript) -> Round:
        began = perf_counter()
        lengths, room = list(transcript.lengths), transcript.room
        open_rows = [row for row, space in enumerate(room) if space > 0]
        fed = self.target.retain(open_rows)
        self.drafter.retain(open_rows)
        self.target.rewind([n - 1 for n in lengths])
        most = self._most_drafts([lengths[row] for row in fed])
        room = [max(min(space - 1, most), 0) for space in room]
        proposal = self.drafter.propose(transcript.ids, lengths, room)
        drafted = perf_counter()
        unread = max(n - read for n, read in zip(lengths, self.target.read, strict=True))
        tokens = torch.cat([last_tokens(transcript.ids, lengths, unread), proposal.tokens], dim=1)
        verified, scores, logits = self._verify(transcript, tokens, proposal, open_rows)
        # The target's one copy from device to host in a round; float32 holds every token id below 2^24.
        decided = torch.stack([verified.n_accepted, verified.next_token], dim=1)
        decided = torch.cat([decided, verified.overlap], dim=1)
        # An accelerator is at work on it; until its answer is waited for, the draft can go on.
        steps_ahead = self.drafter.ahead()
        answers = decided.tolist()
        checked = perf_counter()
        accepted = tuple(int(n) for n, *_ in answers)
        rows = zip(proposal.tokens.tolist(), answers, strict=True)
        new_tokens = [[*drafts[: int(n)], int(token)] for drafts, (n, token, *_) in rows]
        kept = transcript.append(new_tokens)
        transcript.record("scores", scores, kept)
        transcript.record("logits", logits, kept)
        return Round(
            drafted=proposal.lengths,
            accepted=accepted,
            new_tokens=kept,
            overlap=tuple(
                reached_overlap(overlap, n, drafted)
                for (_, _, *overlap), n, drafted in zip(answers, accepted, proposal.lengths, strict=True)
            ),
            draft_steps=proposal.steps + steps_ahead,
            width=tokens.shape[1],
            draft_seconds=drafted - began,
            verify_seconds=checked - drafted,
            seconds=perf_counter() - began,
            room=tuple(room),
        )

    def _most_drafts(self, lengths: Sequence[int]) -> int:
        """How many drafts a pass may hold: as wide for all rows, it ends beyond the longest of them."""
        return MAX_ASSISTANT_TOKENS if self.max_positions is None else self.max_positions - max(lengths)

    def _verify(
        self, transcript: Transcript, tokens: Tensor, proposal: DraftProposal, open_rows: Sequence[int]
    ) -> tuple[Verification, Tensor, Tensor]:
        """One target pass over `tokens` `[B, k]`, what it has not read yet and the drafts, which are judged.

        Returns:
            The verdict, with processed scores and logits `[B, γ+1, V]`.
        """
        ids, lookahead = transcript.ids, proposal.tokens.shape[1]
        # What comes from the host or goes there does so before the pass, which it would wait for on an accelerator.
        draft_lengths = torch.tensor(proposal.lengths, device=ids.device)
        scores_only = self.processors.scores_only
        counts = [] if scores_only else _judged(proposal, open_rows, transcript.eos_tokens)
        # Processors of the caller's own may write into scores, which passes in inference mode forbid outside it.
        logits = self.target.forward(tokens, lookahead + 1).to(ids.device, torch.float32, copy=not scores_only)
        scores = logits
        if self.processors:
            scores = self.processors(
                ids, transcript.lengths, counts, logits.clone() if transcript.keeps_logits else logits
            )
        relaxed = scores
        if self.relaxation is not None and lookahead:
            relaxed = self.relaxation.relax(scores, proposal.tokens, draft_lengths)
        uniforms = None
        if self.do_sample:
            relaxed = sampling.probabilities(relaxed)
            uniforms = sampling.uniforms(*relaxed.shape[:2], device=ids.device)
        verified = self.rule(relaxed, proposal.tokens, draft_lengths, proposal.probs, uniforms)
        return verified, scores, logits


def _judged(proposal: DraftProposal, open_rows: Sequence[int], eos_tokens: frozenset[int]) -> list[int]:
    """Positions of each row that processors have to see: none follows a drafted EOS, as in plain `generate`."""
    drafts = enumerate(zip(proposal.lengths, proposal.tokens.tolist(), strict=True))
    return [(row in open_rows) * (n + (n == 0 or tokens[n - 1] not in eos_tokens)) for row, (n, tokens) in drafts]
