"""The decoding loop: draft, verify, accept, commit, roll back; for any batch size, drafter, rule and relaxation."""

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
from hf_specdec.rules.shared_decisions import shared, with_shared_times
from hf_specdec.rules.statistics import Round, SpeculationStats, reached_overlap
from hf_specdec.rules.verification import Rule, Verification


@dataclass(frozen=True)
class Decoder:
    """The parts of a round; `decode` runs rounds until the transcript is finished.

    Args:
        target: feeds the target model.
        drafter: proposes tokens.
        processors: the caller's, applied to the target's scores.
        relaxation: changes the target's processed scores; None is lossless.
        rule: accepts drafted tokens.
        do_sample: whether the rule needs probabilities and uniform draws.
        mode: the context manager of a round, see `traits.pass_mode`.
        max_positions: the target's context length, which no drafts exceed; None if it has no limit.
        drafts_in_first_round: whether drafts may follow the prompt. Not if a row's last prompt token is masked: eager
            attention spreads such a query evenly over all keys, those of drafts included.
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

    def decode(self, transcript: Transcript, stats: SpeculationStats) -> None:
        """Decode until every row has ended; each round is added to `stats`.

        Afterwards, even after an exception, a cache holds all shown tokens but the last, as plain `generate` leaves
        it. If rows ended at different lengths, it holds the shortest one's; the others' padding is read again when
        the cache is continued.
        """
        try:
            while not transcript.finished:
                with self.mode():
                    stats.rounds.append(with_shared_times(self._round(transcript)))
                self.drafter.observe(stats.rounds[-1])
                transcript.show()
        finally:
            # Not earlier: a sliding window that has dropped a round's drafts can't be rolled back again.
            self.target.end(transcript.common_length - 1)

    def _round(self, transcript: Transcript) -> Round:
        began = perf_counter()
        lengths, room = list(transcript.lengths), transcript.room
        open_rows = [row for row, space in enumerate(room) if space > 0]
        fed = self.target.retain(open_rows)
        self.drafter.retain(open_rows)
        self.target.rewind([n - 1 for n in lengths])
        most = self._most_drafts([lengths[row] for row in fed])
        if not self.drafts_in_first_round and min(lengths) == transcript.prompt_length:
            most = 0
        room = [max(min(space - 1, most), 0) for space in room]
        proposal = self.drafter.propose(transcript.ids, lengths, room)
        drafted = perf_counter()
        unread = max(n - read for n, read in zip(lengths, self.target.read, strict=True))
        tokens = torch.cat([last_tokens(transcript.ids, lengths, unread), proposal.tokens], dim=1)
        verified, recorded = self._verify(transcript, tokens, proposal, open_rows)
        # One copy from device to host per round; float32 holds every token id below 2^24.
        decided = torch.stack([verified.n_accepted, verified.next_token], dim=1)
        decided = shared(torch.cat([decided, verified.overlap, proposal.tokens], dim=1))
        # On an accelerator this doesn't wait for the verification, so that the draft can work in the meantime.
        steps_ahead = self.drafter.ahead()
        answers = decided.tolist()
        checked = perf_counter()
        accepted = tuple(int(n) for n, *_ in answers)
        lookahead = proposal.tokens.shape[1]
        new_tokens = [
            [*map(int, row[2 + lookahead :][:n]), int(row[1])] for n, row in zip(accepted, answers, strict=True)
        ]
        kept = transcript.append(new_tokens)
        for kind, values in recorded.items():
            transcript.record(kind, values, kept)
        return Round(
            drafted=proposal.lengths,
            accepted=accepted,
            new_tokens=kept,
            overlap=tuple(
                reached_overlap(row[2:], n, drafted)
                for row, n, drafted in zip(answers, accepted, proposal.lengths, strict=True)
            ),
            draft_steps=proposal.steps + steps_ahead,
            width=tokens.shape[1],
            draft_seconds=drafted - began,
            verify_seconds=checked - drafted,
            seconds=perf_counter() - began,
            room=tuple(room),
        )

    def _most_drafts(self, lengths: Sequence[int]) -> int:
        """How many drafts a pass may hold; it is equally wide for all rows, so the longest row decides."""
        return MAX_ASSISTANT_TOKENS if self.max_positions is None else self.max_positions - max(lengths)

    def _verify(
        self, transcript: Transcript, tokens: Tensor, proposal: DraftProposal, open_rows: Sequence[int]
    ) -> tuple[Verification, dict[str, Tensor]]:
        """Run the target over `tokens` `[B, k]`, those that it has not read yet and the drafts, and judge the drafts.

        At most three tensors of the size `[B, γ+1, V]` exist at a time, the drafts' probabilities included.

        Returns:
            The verdict, and the "scores" and "logits" `[B, γ+1, V]` if they are recorded.
        """
        ids, lookahead = transcript.ids, proposal.tokens.shape[1]
        # Copies between host and device come before the pass, since on an accelerator they would wait for it.
        draft_lengths = torch.tensor(proposal.lengths, device=ids.device)
        scores_only = self.processors.scores_only
        counts = [] if scores_only else _judged(proposal, open_rows, transcript.eos_tokens)
        logits = self.target.forward(tokens, lookahead + 1)
        recorded = {"logits": logits} if transcript.keeps_logits else {}
        # Processors of the caller's own may write into the scores, so these get a copy.
        scores = logits.to(ids.device, torch.float32, copy=not scores_only)
        del logits
        if self.processors:
            scores = self.processors(ids, transcript.lengths, counts, scores)
        if transcript.records:
            recorded["scores"] = scores
        if self.relaxation is not None and lookahead:
            scores = self.relaxation.relax(scores, proposal.tokens, draft_lengths)
        uniforms = None
        if self.do_sample:
            scores = sampling.probabilities(scores)
            uniforms = sampling.uniforms(*scores.shape[:2], device=ids.device)
        verified = self.rule(scores, proposal.tokens, draft_lengths, proposal.probs, uniforms)
        return verified, recorded


def _judged(proposal: DraftProposal, open_rows: Sequence[int], eos_tokens: frozenset[int]) -> list[int]:
    """How many positions of each row the processors see: none after a drafted EOS, as in plain `generate`."""
    counts = [0] * len(proposal.lengths)
    drafts = proposal.tokens.tolist()
    for row in open_rows:
        drafted = proposal.lengths[row]
        ends = drafted > 0 and drafts[row][drafted - 1] in eos_tokens
        counts[row] = drafted if ends else drafted + 1
    return counts
