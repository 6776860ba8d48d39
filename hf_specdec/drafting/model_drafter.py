"""Drafting with a model, batched; at batch size 1 also in transformers' assisted loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_specdec.drafting.drafter import BaseDrafter, DraftProposal, PreparedDrafting, last_tokens, no_drafts
from hf_specdec.host.forks import Forks
from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.relaxations import CertainWhereKept
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.models.runner_choice import Runner
from hf_specdec.models.states_runner import StatesRunner
from hf_specdec.models.text_only_runner import TextOnlyRunner
from hf_specdec.rules import sampling

# Replaces a token if the processors exclude all, such as a constraint that allows none of a trimmed head's tokens.
EXCLUDED = -2


class ModelDrafter(BaseDrafter):
    """Draft with a small model: one forward pass per token, with a cache that is kept between rounds.

    Args:
        runner: runs the draft model.
        processors: the caller's logits processors, which also apply to the draft's distributions.
        rule: when drafting stops.
        vocabulary: V, the size of the target's vocabulary.
        draft_vocabulary: the size of the draft's vocabulary. The draft reads its last token in place of target tokens
            beyond it.
        do_sample: draw drafts from the draft's processed distribution instead of taking its argmax.
        keep_probs: return the distributions. Without them, drafts count as point masses.
        eos_tokens: drafting stops after one of these.
        max_length, rollback: see `BaseDrafter`.
        max_positions: the draft's context length, which drafts must not exceed; None if it is unlimited.
        steps_per_sync: draft steps between two copies to the host, after which stops take effect. Always 1 with
            processors that read the text.
    """

    def __init__(
        self,
        runner: Runner | TextOnlyRunner | StatesRunner,
        processors: HostProcessors,
        rule: StopRule,
        *,
        vocabulary: int,
        draft_vocabulary: int | None = None,
        do_sample: bool = False,
        keep_probs: bool = False,
        eos_tokens: frozenset[int] = frozenset(),
        max_length: int = 0,
        max_positions: int | None = None,
        steps_per_sync: int = 1,
        rollback: CertainWhereKept | None = None,
    ) -> None:
        super().__init__(rule, max_length=max_length, rollback=rollback)
        self.runner = runner
        self.processors = processors
        self.vocabulary = vocabulary
        self.draft_vocabulary = vocabulary if draft_vocabulary is None else draft_vocabulary
        self.do_sample = do_sample
        self.keep_probs = keep_probs
        self.eos_tokens = eos_tokens
        self.max_positions = max_positions
        self.steps_per_sync = steps_per_sync if processors.scores_only else 1
        self._read = list(runner.read)
        self._rows: Sequence[int] = range(len(self._read))
        self._fed: Sequence[int] = self._rows

    def retain(self, rows: Sequence[int]) -> None:
        """Draft for `rows` only from now on."""
        self._rows, self._fed = rows, self.runner.retain(rows)

    def for_prepared_rounds(self) -> PreparedDrafting | None:
        """Draft with the same model in prepared rounds. Not for subclasses, which draft in other ways."""
        if type(self) is not ModelDrafter:
            return None
        return PreparedDrafting(
            self.rule,
            self.runner,
            self.vocabulary,
            self.draft_vocabulary,
            self.keep_probs,
            self.max_positions,
            self.resume,
        )

    def runners(self) -> list[Any]:
        """The draft's runner."""
        return [self.runner]

    def resume(self, read: Sequence[int]) -> None:
        """Continue after prepared rounds; `read` is the number of tokens of each row that the runner has read."""
        self._read = list(read)

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """Draft with the model, one pass per token, until the stop rule ends every row's draft."""
        # Don't count rejected drafts as read. A round without drafts does not touch the runner and its cache.
        self._read = [min(read, n - 1) for read, n in zip(self._read, lengths, strict=True)]
        limit = self._limit(lengths, room)
        if limit <= 0:
            return no_drafts(ids)
        tokens, starts, room = self._unread(ids, lengths, room)
        proposal = self._draft(ids, tokens, starts, room, limit)
        # Tokens read beyond a row's text are only counted if the text can still grow into them.
        rows = zip(self.runner.read, lengths, room, strict=True)
        self._read = [read if space > 0 else min(read, n) for read, n, space in rows]
        return proposal

    def _limit(self, lengths: Sequence[int], room: Sequence[int]) -> int:
        """The most tokens to draft for any row; drafts nothing if below 1. Arguments as in `propose`."""
        limit = min(self.rule.limit, max(room))
        if self.max_positions is None:
            return limit
        return min(limit, self.max_positions - max(lengths[row] for row in self._fed) + 1)

    def _draft(
        self, ids: Tensor, tokens: Tensor, lengths: Sequence[int], room: Sequence[int], limit: int
    ) -> DraftProposal:
        """Draft up to `limit` ≥ 1 tokens after reading `tokens` `[B, k]`; other arguments as in `propose`."""
        drafted = [0] * len(lengths)
        # Rows that have ended may still be run. Their texts are final, so their drafts go to the end of the buffer.
        places = [n if space > 0 else ids.shape[1] - limit for n, space in zip(lengths, room, strict=True)]
        open_rows = [row for row, space in enumerate(room) if space > 0]
        choices: list[Tensor] = []
        kept_probs: list[Tensor] = []
        unseen: list[Tensor] = []
        uniforms = sampling.uniforms(limit, len(ids), device=ids.device).unbind() if self.do_sample else None
        forks = None
        if self.processors.in_order:
            forks = Forks(self.processors, ids[:, : max(lengths)], self._rows, self.eos_tokens)
        for step in range(limit):
            if self.draft_vocabulary < self.vocabulary:
                tokens = tokens.clamp(max=self.draft_vocabulary - 1)
            logits = self.runner.forward(tokens, 1)[:, -1]
            probs, choice = self._choose(
                ids, [n + step for n in lengths], logits, open_rows, uniforms[step] if uniforms else None, forks
            )
            unseen.append(self._outcome(probs, choice))
            choice = choice.clamp(min=0) if self.do_sample or not self.processors.scores_only else choice
            choices.append(choice)
            if not self.processors.scores_only:
                write_column(ids, [place + step for place in places], choice)
            if self.keep_probs:
                kept_probs.append(probs)
            if len(unseen) == self.steps_per_sync or step + 1 == limit:
                for outcome in torch.stack(unseen).tolist():
                    open_rows = self._after_step(outcome, open_rows, drafted, room)
                unseen.clear()
                # Forks see all rows at once, so they cannot continue after a row without a next token.
                if not open_rows or (forks is not None and any(outcome[0][row] < 0 for row in self._rows)):
                    break
            if forks is not None:
                forks.append(choice)
            tokens = choice.unsqueeze(1)
        longest = max(drafted)
        return DraftProposal(
            torch.stack(choices[:longest], dim=1) if longest else ids[:, :0],
            tuple(drafted),
            torch.stack(kept_probs[:longest], dim=1) if self.keep_probs and longest else None,
            steps=step + 1,
        )

    def _outcome(self, probs: Tensor, choice: Tensor) -> Tensor:
        """`[3, B]`: each row's drafted token, whether the rule stops before it, and whether the rule stops after it."""
        before, after = None, None
        if self.rule.reads_probabilities:
            before, after = self.rule.before_append(probs), self.rule.after_append(probs)
        no_row = torch.zeros_like(choice)
        return torch.stack([choice, *(no_row if rows is None else rows.long() for rows in (before, after))])

    def _after_step(
        self, outcome: list[list[int]], open_rows: list[int], drafted: list[int], room: Sequence[int]
    ) -> list[int]:
        """Count a step's tokens in `drafted` and return the rows that continue.

        Raises:
            ValueError: the draft's scores don't define a distribution.
        """
        tokens, before, after = outcome
        goes_on = []
        for row in open_rows:
            if before[row] or tokens[row] == EXCLUDED:
                continue
            if tokens[row] < 0:
                raise ValueError(
                    "assistant_model: the draft's scores contain NaN or infinity, or exclude every token: check its "
                    "weights, its dtype and the logits processors, or decode with on_draft_error='continue'."
                )
            drafted[row] += 1
            if not after[row] and tokens[row] not in self.eos_tokens and drafted[row] < room[row]:
                goes_on.append(row)
        return goes_on

    def _unread(
        self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]
    ) -> tuple[Tensor, Sequence[int], Sequence[int]]:
        """Roll back to the accepted text, and collect the tokens `[B, k]` that the draft has not read yet.

        k is the same for all rows. After rounds without drafts it can exceed a short row's text. That row then reads
        part of its spare space and gets no drafts in this round.

        Returns:
            The tokens, and the adjusted lengths and room of the rows.
        """
        if not self.runner.rewinds_far:
            self._catch_up(ids, lengths)
        unread = max(lengths[row] - self._read[row] for row in self._rows)
        room = [space if n >= unread else 0 for n, space in zip(lengths, room, strict=True)]
        lengths = [max(n, unread) for n in lengths]
        self.runner.rewind([n - unread for n in lengths])
        return last_tokens(ids, lengths, unread), lengths, room

    def _catch_up(self, ids: Tensor, lengths: Sequence[int]) -> None:
        """Read tokens until the rows have the same number of unread ones.

        Needed for runners that cannot read a token twice. A row that is ahead reads part of its spare space, which is
        then rolled back.
        """
        while len(unread := {lengths[row] - self._read[row] for row in self._rows}) > 1:
            self.runner.rewind(self._read)
            # Tokens that all rows lack are never rolled back, so no states within them are kept.
            common = min(unread) - 1
            width = common or min(max(unread) - 1, ids.shape[1] - max(lengths))
            tokens = last_tokens(ids, [read + width for read in self._read], width)
            self.runner.forward(tokens, 1 if common else width)
            self._read = [min(read + width, n - 1) for n, read in zip(lengths, self._read, strict=True)]
            self.runner.rewind(self._read)

    def _choose(
        self,
        ids: Tensor,
        lengths: Sequence[int],
        logits: Tensor,
        open_rows: Sequence[int],
        uniforms: Tensor | None,
        forks: Forks | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The next token's distribution `[B, V]` (its scores, if only the argmax is needed) and the token `[B]`.

        The token is drawn with `uniforms` `[B]`, or is the most probable one if they are None. Where the processors
        exclude every token, it is `EXCLUDED`, and the distribution is arbitrary.
        """
        needs_probs = self.do_sample or self.keep_probs or self.rule.reads_probabilities
        if not needs_probs and not self.processors:
            return logits, logits[:, : self.vocabulary].argmax(dim=-1).to(ids.device)
        scores_only = self.processors.scores_only
        scores = align_vocabulary(logits, self.vocabulary).to(ids.device, torch.float32, copy=not scores_only)
        if scores_only:
            scores = self.processors.process_flat(ids, scores)
        elif forks is not None:
            scores = forks.process(scores, open_rows)
        else:
            counts = [int(row in open_rows) for row in range(len(lengths))]
            scores = self.processors(ids, lengths, counts, scores.unsqueeze(1)).squeeze(1)
        if self.processors.can_exclude_all:
            excluded = scores.amax(dim=-1) == -torch.inf
            scores = scores.masked_fill(excluded.unsqueeze(1), 0.0)
        probs = sampling.probabilities(scores) if needs_probs else scores
        choice = probs.argmax(dim=-1) if uniforms is None else sampling.draw(probs, uniforms)
        return probs, choice.masked_fill(excluded, EXCLUDED) if self.processors.can_exclude_all else choice


def align_vocabulary(logits: Tensor, vocabulary: int) -> Tensor:
    """Logits `[..., V']` over the target's vocabulary: padding is cut, and missing tokens get probability 0."""
    missing = vocabulary - logits.shape[-1]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[..., :vocabulary]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


def write_column(ids: Tensor, positions: Sequence[int], tokens: Tensor) -> None:
    """Write one token `[B]` to each row at the row's position."""
    if min(positions) == max(positions):
        ids[:, positions[0]] = tokens
    else:
        ids.scatter_(1, torch.tensor(positions, device=ids.device).unsqueeze(1), tokens.unsqueeze(1))
