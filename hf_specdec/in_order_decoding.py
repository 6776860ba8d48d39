"""`InOrderDecoder`: the decoding loop for stateful processors, which see each kept text once and in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from hf_specdec.decoding import Decoder, Settled
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.host.transcript import Transcript
from hf_specdec.rules import sampling
from hf_specdec.rules.shared_decisions import shared


@dataclass(frozen=True)
class InOrderDecoder(Decoder):
    """`Decoder` whose rounds call processors, criteria and the streamer as plain `generate` does, column by column.

    The target still reads a round's drafts in one pass. Then the columns are settled one by one: the processors get
    one column's scores of the whole batch, each row's draft is kept or replaced, and the criteria and the streamer see
    the column. The next column follows if every row has kept its draft. So processors never see a text that is not
    kept, nor one text twice, and rows stay equally long.

    Each token is judged alone, which is exact for every rule and relaxation; block verification then keeps no more
    tokens than the token-wise rule.
    """

    def _settle(
        self, transcript: Transcript, unread: Tensor, proposal: DraftProposal, open_rows: Sequence[int]
    ) -> Settled:
        began = perf_counter()
        lookahead = _common_length(proposal, open_rows, transcript.eos_tokens)
        tokens, rows = torch.cat([unread, proposal.tokens[:, :lookahead]], dim=1), len(unread)
        drafted = torch.tensor(proposal.lengths, device=tokens.device)
        logits = self.target.forward(tokens, lookahead + 1)
        accepted, added, overlap, shown = [0] * rows, [0] * rows, [0.0] * rows, 0.0
        for column in range(lookahead + 1):
            scores = logits[:, column].to(tokens.device, torch.float32, copy=True)
            length = max(transcript.lengths)
            scores = self.processors.next_scores(transcript.ids[:, :length], scores, open_rows)
            judged = self._judge(scores, proposal, drafted > column, column)
            kept = transcript.append([[int(token)] for _, token, _ in judged])
            for kind, values in (("scores", scores), ("logits", logits[:, column])):
                transcript.record(kind, values.unsqueeze(1), kept)
            for row, (stands, _, shared_mass) in enumerate(judged):
                if kept[row]:
                    accepted[row] += int(stands)
                    added[row] += 1
                    overlap[row] += shared_mass * (column < proposal.lengths[row])
            before = perf_counter()
            transcript.show()
            shown += perf_counter() - before
            open_rows = [row for row, space in enumerate(transcript.room) if space > 0]
            if transcript.finished or not all(judged[row][0] for row in open_rows):
                break
        self.processors.end_round()
        seconds = perf_counter() - began - shown
        return Settled(tuple(accepted), tuple(added), tuple(overlap), tokens.shape[1], seconds, shown)

    def _judge(self, scores: Tensor, proposal: DraftProposal, drafted: Tensor, column: int) -> list[list[float]]:
        """Judge one column of a proposal.

        Args:
            scores: `[B, V]`, the processed scores.
            drafted: `[B]` bool, the rows that have a draft in this column.

        Returns:
            For each row whether its draft is kept, its token, and Σ_x min(p(x), q(x)).
        """
        drafts, lengths = proposal.tokens[:, column : column + 1], drafted.long()  # no drafts after the last column
        probs = None if proposal.probs is None else proposal.probs[:, column : column + drafts.shape[1]]
        scores = scores.unsqueeze(1)
        if self.relaxation is not None and drafts.shape[1]:
            scores = self.relaxation.relax(scores, drafts, lengths, probs)
        uniforms = None
        if self.do_sample:
            scores = sampling.probabilities(scores)
            uniforms = sampling.uniforms(len(drafts), drafts.shape[1] + 1, device=drafts.device)
        # A rule also needs the distribution after the drafts; its draw from there is not used.
        scores = scores.expand(-1, drafts.shape[1] + 1, -1)
        verified = self.rule(scores, drafts, lengths, probs, uniforms)
        tokens, overlap = verified.next_token, torch.zeros_like(scores[:, 0, 0])
        if drafts.shape[1]:
            tokens = torch.where(verified.n_accepted > 0, drafts[:, 0], tokens)
            overlap = verified.overlap[:, 0]
        decided: list[list[float]] = shared(torch.stack([verified.n_accepted, tokens, overlap], dim=1)).tolist()
        return decided


def _common_length(proposal: DraftProposal, open_rows: Sequence[int], eos_tokens: frozenset[int]) -> int:
    """The number of drafted columns that all rows reach together; a row that ends in its draft limits no other."""
    drafts = proposal.tokens.tolist()
    drafted = [drafts[row][: proposal.lengths[row]] for row in open_rows]
    return min((len(row) for row in drafted if not row or row[-1] not in eos_tokens), default=max(map(len, drafted)))
