"""The two steps of a round, drafting and verification, as functions of tensors that can be captured or compiled.

They never read a value on the host, and their arguments fix every shape. Drafting always runs γ steps. A rule that
stops earlier only shortens the draft's length, which is part of the round's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.drafting.model_drafter import align_vocabulary
from hf_specdec.host.relaxations import Relaxation
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.models.masks import attention_windows
from hf_specdec.models.static_cache import RowsCache
from hf_specdec.models.static_runner import static_pass
from hf_specdec.models.traits import Outputs
from hf_specdec.rules import sampling
from hf_specdec.rules.verification import Rule


@dataclass(frozen=True)
class Side:
    """A model, its cache and the state of the cache's slots.

    Args:
        held: the draft or the target, by a weak reference: engines do not keep models alive.
        cache: the model's keys and values.
        positions, visible: `[B, capacity]`, see `StaticRunner`.
        outputs: which outputs the model's passes return.
        layers_read: the layers whose hidden states they return, see `HiddenStates`.
    """

    held: Callable[[], PreTrainedModel | None]
    cache: RowsCache
    positions: Tensor
    visible: Tensor
    outputs: Outputs
    layers_read: tuple[int, ...] = ()

    def read(self, tokens: Tensor, slots: Tensor, count: int) -> Tensor:
        """Logits `[B, count, V]` in float32 after reading `tokens` into `slots`, `[B, k]`."""
        logits: Tensor = self.run(tokens, slots, count).logits
        return logits[:, -count:].float()

    def run(self, tokens: Tensor, slots: Tensor, count: int | None) -> Any:
        """Run a pass and return the model's output, with at least the last `count` logits; all if None."""
        model = self.held()
        assert model is not None  # the caller holds the model
        return static_pass(
            model,
            self.cache,
            tokens,
            slots,
            self.positions,
            self.visible,
            attention_windows(model.config),
            span=self.cache.capacity,
            asked=self.outputs.last(count),
        )


@dataclass(frozen=True)
class Plan:
    """The settings of a round that are constants of its steps.

    Args:
        lookahead: γ, the tokens drafted in a round; 0 decodes without drafts.
        vocabulary, draft_vocabulary: see `ModelDrafter`.
        do_sample: sample the drafts and the target's tokens.
        keep_probs: pass the drafts' distributions to the verification rule.
        stop: ends a row's draft early.
        processors: the call's logits processors; of a text, they may read its length. An engine's steps call those that
            suppress tokens as `Suppression`s.
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
    processors: tuple[Any, ...]
    relaxation: Relaxation | None
    rule: Rule
    eos_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Drafts:
    """The drafts of γ calls of `draft_token`; tuples have one entry per token.

    Args:
        tokens: `[B, 1]` each.
        probs: `[B, V]` each, if `Plan.keep_probs`.
        before: `[B]` each, whether the stop rule ends the row before this token; empty if it never does.
        after: `[B]` each, whether it ends the row after this token; empty if it never does.
    """

    tokens: tuple[Tensor, ...] = ()
    probs: tuple[Tensor, ...] = ()
    before: tuple[Tensor, ...] = ()
    after: tuple[Tensor, ...] = ()

    def __add__(self, more: Drafts) -> Drafts:
        """Append further drafts."""
        return Drafts(
            self.tokens + more.tokens,
            self.probs + more.probs,
            self.before + more.before,
            self.after + more.after,
        )

    def parts(self) -> tuple[tuple[Tensor, ...], ...]:
        """The tensors, as arguments of `verify_step`."""
        return self.tokens, self.probs, self.before, self.after


def first_slots(state: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of a round's first draft pass and their slots, `[B, 2]` each.

    The pass always reads a row's last two tokens. After a full acceptance the draft model has read neither; otherwise
    the first is read again, so that both cases have one shape.

    Args:
        state: see `verify_step`.
    """
    return state[:, :2], state[:, 2:3] + torch.arange(-2, 0, device=state.device)


def draft_token(
    side: Side, plan: Plan, tokens: Tensor, slots: Tensor, *uniforms: Tensor
) -> tuple[tuple[Tensor, ...], ...]:
    """Draft one token for every row after reading `tokens` `[B, k]` into `slots` `[B, k]`.

    Args:
        uniforms: `[B]`, for the draw; only if drafts are sampled.

    Returns:
        The token and its slot, `[B, 1]` each; then its other entries of `Drafts`, each empty or one tensor.
    """
    known = tokens.clamp(max=plan.draft_vocabulary - 1) if plan.draft_vocabulary < plan.vocabulary else tokens
    logits = align_vocabulary(side.read(known, slots, 1)[:, -1], plan.vocabulary)
    scores = _process(plan.processors, slots[:, -1] + 1, logits)
    reads = plan.stop.reads_probabilities
    probs = sampling.probabilities(scores) if plan.do_sample or reads or plan.keep_probs else scores
    choice = sampling.draw(probs, uniforms[0]).clamp(min=0) if plan.do_sample else scores.argmax(dim=-1)
    before = plan.stop.before_append(probs) if reads else None
    after = plan.stop.after_append(probs) if reads else None
    return (
        (choice.unsqueeze(1), slots[:, -1:] + 1),
        (probs,) if plan.keep_probs else (),
        () if before is None else (before,),
        () if after is None else (after,),
    )


def verify_step(
    side: Side,
    plan: Plan,
    state: Tensor,
    tokens: tuple[Tensor, ...],
    probs: tuple[Tensor, ...],
    before: tuple[Tensor, ...],
    after: tuple[Tensor, ...],
    *uniforms: Tensor,
) -> Tensor:
    """Verify the drafts with one target pass over each row's last token and its drafts.

    Args:
        state: `[B, 4]`: the last token but one, the last token, the row's length, the most tokens to draft.
        tokens, probs, before, after: see `Drafts`.
        uniforms: `[B, γ+1]`, for the rule; only if tokens are sampled.

    Returns:
        `[B, 2γ+3]` float64, one tensor so that the host copies once: γ drafts, their length, the number accepted, the
        target's own token, and γ overlaps (see `Verification`).
    """
    drafts = torch.cat(tokens, dim=1) if tokens else state[:, :0]
    lengths, _ = draft_lengths(plan, state[:, 3], tokens, before, after)
    draft_probs = torch.stack(probs, dim=1) if probs else None
    read = torch.cat([state[:, 1:2], drafts], dim=1)
    slots = state[:, 2:3] - 1 + torch.arange(read.shape[1], device=state.device)
    logits = side.read(read, slots, read.shape[1])
    scores = _process(plan.processors, (slots + 1).flatten(), logits.flatten(0, 1)).view_as(logits)
    if plan.relaxation is not None and plan.lookahead:
        scores = plan.relaxation.relax(scores, drafts, lengths, draft_probs)
    if plan.do_sample:
        scores = sampling.probabilities(scores)
    verified = plan.rule(scores, drafts, lengths, draft_probs, uniforms[0] if uniforms else None)
    columns = torch.stack([lengths, verified.n_accepted, verified.next_token], dim=1)
    return torch.cat([drafts.double(), columns.double(), verified.overlap.double()], dim=1)


def _process(processors: Sequence[Any], lengths: Tensor, scores: Tensor) -> Tensor:
    """The processed scores `[N, V]` of the tokens after texts of some `lengths` `[N]`, which stand in for the texts."""
    for processor in processors:
        scores = processor(lengths, scores)
    return scores


def draft_lengths(
    plan: Plan, limits: Tensor, tokens: Sequence[Tensor], before: Sequence[Tensor], after: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The length of each row's draft, `[B]`, and whether neither a stop rule nor an EOS token ended it, `[B]`.

    Args:
        limits: `[B]`, the most tokens of a row.
        tokens, before, after: see `Drafts`.
    """
    if not tokens:
        return torch.zeros_like(limits), torch.ones_like(limits, dtype=torch.bool)
    drafts = torch.cat(list(tokens), dim=1)
    ends = torch.stack(list(after), dim=1) if after else torch.zeros_like(drafts, dtype=torch.bool)
    for token in plan.eos_tokens:
        ends = ends | (drafts == token)
    counts = (ends.cumsum(dim=1) - ends.long()) == 0
    if before:
        counts = counts & ((torch.stack(list(before), dim=1).cumsum(dim=1)) == 0)
    return torch.minimum(counts.sum(dim=1), limits), counts[:, -1] & ~ends[:, -1]
