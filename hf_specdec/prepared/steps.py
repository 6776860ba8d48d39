"""The two steps of a round as plain functions of static tensors: what a CUDA graph captures and `torch.compile` takes.

Nothing here reads a number on the host, and every shape is fixed by the arguments. Drafting runs all γ steps; rules
that stop a draft earlier only shorten its length, which is known with the round's result.
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
from hf_specdec.prepared.top_k import keep_top_k
from hf_specdec.rules import sampling
from hf_specdec.rules.verification import Rule


@dataclass(frozen=True)
class Side:
    """One model with its cache and what its slots hold.

    Args:
        model: the draft or the target.
        cache: its keys and values.
        positions, visible: `[B, capacity]`, see `StaticRunner`.
        keeps_logits: whether the model can be asked for the last logits only.
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
    """How rounds run; constants of the steps, and with the shapes what tells one compiled step from another.

    Args:
        lookahead: γ, drafted tokens of a round; 0 decodes plainly.
        vocabulary, draft_vocabulary: as of `ModelDrafter`.
        do_sample: draw drafts and the target's tokens.
        keep_probs: the rule is given the drafts' distributions.
        stop: ends a row's draft before its length.
        processors: the host's; they read scores alone.
        relaxation: changes the target's processed scores.
        rule: accepts drafts.
        eos_tokens: nothing is drafted after one of these.
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


# Tokens `[B, γ]`, the drafts' lengths `[B]`, their distributions `[B, γ, V]` if kept.
Drafts = tuple[Tensor, Tensor, Tensor | None]


def draft_step(side: Side, plan: Plan, state: Tensor, uniforms: Tensor) -> tuple[Drafts, Tensor]:
    """Draft γ tokens for every row.

    The first pass reads a row's last two tokens, also where one of them was read before: so the catch-up after a
    full acceptance changes no shape.

    Args:
        state: `[B, 4]`: the token before the last, the last, the row's length, the most tokens to draft.
        uniforms: `[B, ≥ γ]`, for the draws.

    Returns:
        The drafts, and `[B]` whether a row's could go on: no rule and no end of text has stopped it.
    """
    tokens, slots = state[:, :2], state[:, 2:3] + torch.arange(-2, 0, device=state.device)
    drafts, kept, open_rows, last_rows = [], [], [], []
    for step in range(plan.lookahead):
        known = tokens.clamp(max=plan.draft_vocabulary - 1) if plan.draft_vocabulary < plan.vocabulary else tokens
        logits = align_vocabulary(side.read(known, slots, 1)[:, -1], plan.vocabulary)
        scores = _process(plan.processors, tokens, logits)
        probs = sampling.probabilities(scores) if plan.do_sample or plan.stop.reads_probabilities else scores
        choice = sampling.draw(probs, uniforms[:, step]) if plan.do_sample else scores.argmax(dim=-1)
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
    """One target pass over each row's last token and its drafts, judged.

    Args:
        state: as of `draft_step`.
        drafts, lengths, draft_probs: what it returned; `[B, 0]`, zeros and None in plain decoding.
        uniforms: `[B, γ+1]`, for the rule.

    Returns:
        `[B, 2γ+3]` float64, for one copy to the host: the drafts, their length, how many are accepted, the target's
        own token, and the overlaps (see `Verification`).
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
    """Drafts up to a row's limit, before its first stop, and up to its first last token or end of text, `[B]`.

    And whether neither stop nor end came, `[B]`.
    """
    ends = torch.stack(last_rows, dim=1) if last_rows else torch.zeros_like(drafts, dtype=torch.bool)
    for token in eos_tokens:
        ends = ends | (drafts == token)
    counts = (ends.cumsum(dim=1) - ends.long()) == 0
    if open_rows:
        counts &= torch.stack(open_rows, dim=1).cumprod(dim=1).bool()
    return torch.minimum(counts.sum(dim=1), limits), counts[:, -1] & ~ends[:, -1]
