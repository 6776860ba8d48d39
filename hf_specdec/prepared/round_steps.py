"""The two steps of a round, drafting and verification, as functions of tensors that can be captured or compiled.

They never read a value on the host, and their arguments fix every shape. Drafting always runs γ steps. A rule that
stops earlier only shortens the draft's length, which is part of the round's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, TopKLogitsWarper

from hf_specdec.drafting.model_drafter import align_vocabulary
from hf_specdec.host.processors import Relaxation
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.models.masks import attention_windows
from hf_specdec.models.static_cache import RowsCache
from hf_specdec.models.static_runner import static_pass
from hf_specdec.prepared.blockwise_top_k import keep_top_k
from hf_specdec.rules import sampling
from hf_specdec.rules.verification import Rule


@dataclass(frozen=True)
class Side:
    """A model, its cache and the state of the cache's slots.

    Args:
        model: the draft or the target.
        cache: the model's keys and values.
        positions, visible: `[B, capacity]`, see `StaticRunner`.
        keeps_logits: whether the model's `forward` takes `logits_to_keep`.
    """

    model: PreTrainedModel
    cache: RowsCache
    positions: Tensor
    visible: Tensor
    keeps_logits: bool

    def read(self, tokens: Tensor, slots: Tensor, count: int) -> Tensor:
        """Logits `[B, count, V]` in float32 after reading `tokens` into `slots`, `[B, k]`."""
        logits = static_pass(
            self.model,
            self.cache,
            tokens,
            slots,
            self.positions,
            self.visible,
            attention_windows(self.model.config),
            span=self.cache.capacity,
            count=count if self.keeps_logits else None,
        )
        return logits[:, -count:].float()


@dataclass(frozen=True)
class Plan:
    """The settings of a round that are constants of its steps.

    Args:
        lookahead: γ, the tokens drafted in a round; 0 decodes without drafts.
        vocabulary, draft_vocabulary: see `ModelDrafter`.
        do_sample: sample the drafts and the target's tokens.
        keep_probs: pass the drafts' distributions to the verification rule.
        stop: ends a row's draft early.
        processors: the call's logits processors, which may read the scores only.
        relaxation: changes the target's processed scores before verification.
        rule: the verification rule.
        eos_tokens: a draft ends with one of these.
    """

    lookahead: int
    vocabulary: int
    draft_vocabulary: int
    do_sample: bool
    keep_probs: bool
    stop: StopRule
    processors: tuple[LogitsProcessor, ...]
    relaxation: Relaxation | None
    rule: Rule
    eos_tokens: tuple[int, ...]


# Tokens `[B, γ]`, lengths `[B]`, and distributions `[B, γ, V]` if `Plan.keep_probs`.
Drafts = tuple[Tensor, Tensor, Tensor | None]


def draft_step(side: Side, plan: Plan, state: Tensor, uniforms: Tensor) -> tuple[Drafts, Tensor]:
    """Draft γ tokens for every row.

    The first pass always reads a row's last two tokens. After a full acceptance the draft model has read neither;
    otherwise the first is read again, so that both cases have one shape.

    Args:
        state: `[B, 4]`: the last token but one, the last token, the row's length, the most tokens to draft.
        uniforms: `[B, ≥ γ]`, for the draws.

    Returns:
        The drafts, and `[B]` whether a row's draft can be continued: neither a stop rule nor an EOS token ended it.
    """
    tokens, slots = state[:, :2], state[:, 2:3] + torch.arange(-2, 0, device=state.device)
    drafts, kept, open_rows, last_rows = [], [], [], []
    for step in range(plan.lookahead):
        known = tokens.clamp(max=plan.draft_vocabulary - 1) if plan.draft_vocabulary < plan.vocabulary else tokens
        logits = align_vocabulary(side.read(known, slots, 1)[:, -1], plan.vocabulary)
        scores = _process(plan.processors, tokens, logits)
        probs = sampling.probabilities(scores) if plan.do_sample or plan.stop.reads_probabilities else scores
        choice = sampling.draw(probs, uniforms[:, step]).clamp(min=0) if plan.do_sample else scores.argmax(dim=-1)
        if plan.stop.reads_probabilities:
            before, after = plan.stop.before_append(probs), plan.stop.after_append(probs)
            open_rows += [] if before is None else [~before]
            last_rows += [] if after is None else [after]
        drafts.append(choice)
        kept.append(probs)
        tokens, slots = choice.unsqueeze(1), slots[:, -1:] + 1
    drafted = torch.stack(drafts, dim=1)
    lengths, goes_on = _draft_lengths(drafted, state[:, 3], open_rows, last_rows, plan.eos_tokens)
    return (drafted, lengths, torch.stack(kept, dim=1) if plan.keep_probs else None), goes_on


def verify_step(
    side: Side,
    plan: Plan,
    state: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    draft_probs: Tensor | None,
    uniforms: Tensor,
) -> Tensor:
    """Verify the drafts with one target pass over each row's last token and its drafts.

    Args:
        state: see `draft_step`.
        drafts, lengths, draft_probs: the result of `draft_step`; without drafts `[B, 0]`, zeros and None.
        uniforms: `[B, γ+1]`, for the rule.

    Returns:
        `[B, 2γ+3]` float64, one tensor so that the host copies once: γ drafts, their length, the number accepted, the
        target's own token, and γ overlaps (see `Verification`).
    """
    tokens = torch.cat([state[:, 1:2], drafts], dim=1)
    slots = state[:, 2:3] - 1 + torch.arange(tokens.shape[1], device=state.device)
    logits = side.read(tokens, slots, tokens.shape[1])
    scores = _process(plan.processors, tokens, logits.flatten(0, 1)).view_as(logits)
    if plan.relaxation is not None and plan.lookahead:
        scores = plan.relaxation.relax(scores, drafts, lengths)
    if plan.do_sample:
        scores = sampling.probabilities(scores)
    verified = plan.rule(scores, drafts, lengths, draft_probs, uniforms)
    columns = torch.stack([lengths, verified.n_accepted, verified.next_token], dim=1)
    return torch.cat([drafts.double(), columns.double(), verified.overlap.double()], dim=1)


def _process(processors: Sequence[LogitsProcessor], tokens: Tensor, scores: Tensor) -> Tensor:
    for processor in processors:
        by_blocks = type(processor) is TopKLogitsWarper and scores.device.type == "cpu"
        scores = keep_top_k(processor, scores) if by_blocks else processor(tokens, scores)
    return scores


def _draft_lengths(
    drafts: Tensor,
    limits: Tensor,
    open_rows: list[Tensor],
    last_rows: list[Tensor],
    eos_tokens: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """The length of each row's draft, `[B]`, and whether neither a stop rule nor an EOS token ended it, `[B]`.

    A draft ends at the row's limit, before the first position of `open_rows` that is False, and after the first
    position of `last_rows` that is True or the first EOS token.
    """
    ends = torch.stack(last_rows, dim=1) if last_rows else torch.zeros_like(drafts, dtype=torch.bool)
    for token in eos_tokens:
        ends = ends | (drafts == token)
    counts = (ends.cumsum(dim=1) - ends.long()) == 0
    if open_rows:
        counts &= torch.stack(open_rows, dim=1).cumprod(dim=1).bool()
    return torch.minimum(counts.sum(dim=1), limits), counts[:, -1] & ~ends[:, -1]
