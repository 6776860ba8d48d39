"""Scores on their way to a decision: the host's processors as plain `generate` applies them, and relaxations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as host

# They read the scores alone, row by row, so that all positions may go through them at once.
SCORES_ONLY = (
    host.TemperatureLogitsWarper,
    host.TopKLogitsWarper,
    host.TopPLogitsWarper,
    host.MinPLogitsWarper,
    host.TypicalLogitsWarper,
    host.EpsilonLogitsWarper,
    host.EtaLogitsWarper,
    host.InfNanRemoveLogitsProcessor,
    host.LogitNormalization,
    host.SuppressTokensLogitsProcessor,
)

# They carry state from call to call, or run a model of their own, and so can't look at drafts and forget them.
STATEFUL = (
    host.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    host.ClassifierFreeGuidanceLogitsProcessor,
    host.SynthIDTextWatermarkLogitsProcessor,
)


class Relaxation(Protocol):
    """Changes the target's processed scores so that the lossless rules accept more."""

    def relax(self, scores: Tensor, draft_tokens: Tensor, lengths: Tensor) -> Tensor:
        """Relaxed scores `[B, γ+1, V]` of a round; `draft_tokens` `[B, γ]`, `lengths` `[B]`."""


class HostProcessors:
    """The host's processors applied to several positions of rows of uneven length.

    Each call of a processor gets what plain `generate` would give it: all rows of the batch in their order, at
    one prefix length, padding included. Rows that have no position of that length are shown their own text, cut
    or padded to it, and what comes back for them is dropped. `prefix_allowed_tokens_fn` is asked for the rows
    in question only, since a constraint need not have an answer for text that never was.

    Args:
        processors: as `generate` built them, in order.
        pad_token: fills rows that are shown longer than they are.

    Attributes:
        scores_only: whether all of them are transformers' own that read the scores alone.
    """

    def __init__(self, processors: LogitsProcessorList, pad_token: int = 0) -> None:
        self.processors = processors
        self.pad_token = pad_token
        self.scores_only = all(type(processor) in SCORES_ONLY for processor in processors)

    def __bool__(self) -> bool:
        return len(self.processors) > 0

    @property
    def portable(self) -> bool:
        """Whether they process scores on any device: they read these alone, and hold no tensor of another one."""
        return self.scores_only and not any(
            isinstance(held, Tensor) for p in self.processors for held in vars(p).values()
        )

    def __call__(self, ids: Tensor, starts: Sequence[int], counts: Sequence[int], scores: Tensor) -> Tensor:
        """Process scores in place where processors do.

        Args:
            ids: `[B, N]` left-aligned texts, drafts included.
            starts: per row the length of the prefix at position 0.
            counts: per row the positions that matter; 0 for rows that have ended. Not read where `scores_only`.
            scores: `[B, K, V]` float32, owned by the caller where processors of other kinds may write into them.

        Returns:
            Processed scores `[B, K, V]`.
        """
        if self.scores_only:
            return self.at_once(ids, scores.flatten(0, 1)).view_as(scores)
        for processor in self.processors:
            if type(processor) in SCORES_ONLY:
                scores = processor(ids, scores.flatten(0, 1)).view_as(scores)
            else:
                self._by_prefix(processor, ids, starts, counts, scores)
        return scores

    def at_once(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Process the scores `[N, V]` of any positions; only where `scores_only`, and never in place."""
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores

    def allowed(self, row: int, text: Tensor, tokens: Sequence[int]) -> int:
        """How many of the `tokens` that may follow a row's `text` `[n]` a `prefix_allowed_tokens_fn` lets through."""
        constraints = [p for p in self.processors if isinstance(p, host.PrefixConstrainedLogitsProcessor)]
        for position, token in enumerate(tokens if constraints else ()):
            prefix = torch.cat([text, text.new_tensor(tokens[:position])])
            if any(token not in p._prefix_allowed_tokens_fn(row, prefix) for p in constraints):
                return position
        return len(tokens)

    def _by_prefix(
        self, processor: LogitsProcessor, ids: Tensor, starts: Sequence[int], counts: Sequence[int], scores: Tensor
    ) -> None:
        """Run one processor once for each prefix length that occurs, writing into `scores`."""
        spans = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        for length in sorted({n for span in spans for n in span}):
            rows = [row for row, span in enumerate(spans) if length in span]
            positions = [min(max(length - start, 0), scores.shape[1] - 1) for start in starts]
            at_length = scores[torch.arange(len(starts)), positions]
            prefixes = self._prefixes(ids, spans, length, rows)
            if isinstance(processor, host.PrefixConstrainedLogitsProcessor):
                processed = _constrain(processor, prefixes, at_length, rows)
            else:
                processed = processor(prefixes, at_length)
            scores[rows, [positions[row] for row in rows]] = processed[rows]

    def _prefixes(self, ids: Tensor, spans: list[range], length: int, rows: list[int]) -> Tensor:
        """`[B, length]`: the rows' texts at one length."""
        prefixes = ids[:, :length]
        if len(rows) == len(spans):
            return prefixes
        prefixes = prefixes.clone()
        for row, span in enumerate(spans):
            prefixes[row, max(span.stop - 1, span.start) :] = self.pad_token
        return prefixes


def _constrain(
    processor: host.PrefixConstrainedLogitsProcessor, prefixes: Tensor, scores: Tensor, rows: list[int]
) -> Tensor:
    """`PrefixConstrainedLogitsProcessor.__call__` for some rows of a batch, each under its own batch index."""
    mask = torch.full_like(scores, -torch.inf)
    for row in rows:
        allowed = processor._prefix_allowed_tokens_fn(row, prefixes[row])
        if len(allowed) == 0:
            raise ValueError(
                f"`prefix_allowed_tokens_fn` returned an empty list for batch ID {row}: the constraint is "
                "unsatisfiable. Return at least one token for every prefix that it allows."
            )
        mask[row, allowed] = 0
    return scores + mask


class BildRollback(LogitsProcessor):
    """BiLD's rollback (Kim et al. 2023, section 3.3) on the target's processed scores.

    A drafted token x stands where -ln p_target(x) is at most `threshold` nats; in greedy decoding also where it
    is the target's argmax. There the scores become certain of x; where it falls they stay as they are. The
    lossless rules then do the rest: at a fallen token the target's own choice follows in the same pass.

    In our loop `relax` sees the whole round. As a `LogitsProcessor` it sees prefixes only, so that it holds the
    round's proposal (`hold`), batch size 1.

    Args:
        threshold: nats; 0 changes nothing that the target would not choose itself.
        greedy: whether the target decodes greedily.
    """

    def __init__(self, threshold: float, *, greedy: bool) -> None:
        self.threshold = threshold
        self.greedy = greedy
        self._start = 0
        self._tokens: list[int] = []

    def relax(self, scores: Tensor, draft_tokens: Tensor, lengths: Tensor) -> Tensor:
        """See `Relaxation.relax`."""
        lookahead = draft_tokens.shape[1]
        drafted = scores[:, :lookahead]
        token_scores = drafted.gather(2, draft_tokens.unsqueeze(2)).squeeze(2)
        stands = drafted.logsumexp(dim=2) - token_scores <= self.threshold
        if self.greedy:
            stands |= drafted.argmax(dim=2) == draft_tokens
        stands &= torch.arange(lookahead, device=lengths.device) < lengths.unsqueeze(1)
        certain = torch.full_like(drafted, -torch.inf).scatter_(2, draft_tokens.unsqueeze(2), 0.0)
        relaxed = torch.where(stands.unsqueeze(2), certain, drafted)
        return torch.cat([relaxed, scores[:, lookahead:]], dim=1)

    def hold(self, start: int, tokens: Sequence[int]) -> None:
        """Hold a proposal: `tokens` drafted after a prefix of `start` tokens."""
        self._start, self._tokens = start, list(tokens)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Relax the scores `[1, V]` after the prefix `[1, n]` if the held proposal has a token there."""
        position = input_ids.shape[1] - self._start
        if not 0 <= position < len(self._tokens):
            return scores
        token = torch.tensor([[self._tokens[position]]], device=scores.device)
        return self.relax(scores.unsqueeze(1), token, token.new_ones(1)).squeeze(1)


def check_stateless(processors: LogitsProcessorList, generation_config: GenerationConfig) -> None:
    """Refuse processors that keep state from call to call.

    Raises:
        ValueError: names the processor, the argument that made it, its value, and the way out.
    """
    for processor in processors:
        if isinstance(processor, STATEFUL):
            name = type(processor).__name__
            synthid = isinstance(processor, host.SynthIDTextWatermarkLogitsProcessor)
            argument = "watermarking_config" if synthid else "guidance_scale"
            value = getattr(generation_config, argument, None)
            shown = value if value is None or argument == "guidance_scale" else value.to_dict()
            # Without a value in the call's settings it was given as an object.
            given = f"logits_processor=[{name}]" if value is None else f"{argument}={shown}"
            raise ValueError(
                f"{given}: {name} keeps state from call to call and can't take back what it saw of rejected drafts: "
                "drop it, or decode without speculation."
            )
