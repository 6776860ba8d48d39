"""Lossless acceptance rules: pure functions from two models' answers to accepted tokens.

All rules share one signature. They know of no forward pass, no cache, no end of sequence and no strategy;
relaxations such as BiLD's act on the target's scores before a rule sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.rules.sampling import draw

# Times a probability, in float32 still above zero, and far below what a sum of probabilities is rounded to.
_NEXT_TO_NOTHING = 1e-25


@dataclass(frozen=True)
class Verification:
    """What a rule decided.

    Args:
        n_accepted: `[B]`, drafted tokens kept.
        next_token: `[B]`, the target's own token that follows them.
        overlap: `[B, γ]`, Σ_x min(p(x), q(x)) at each drafted position; past a row's length arbitrary.
    """

    n_accepted: Tensor
    next_token: Tensor
    overlap: Tensor


Rule = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Verification]


def greedy(
    target_scores: Tensor,
    draft_tokens: Tensor,
    lengths: Tensor,
    draft_probs: Tensor | None = None,
    uniforms: Tensor | None = None,
) -> Verification:
    """Keep drafted tokens as long as each is the target's argmax (Leviathan et al. 2023, the case T = 0).

    Args:
        target_scores: `[B, γ+1, V]`, probabilities or any scores in the same order.
        draft_tokens: `[B, γ]`; positions past a row's length are ignored.
        lengths: `[B]`, drafted tokens of each row.
        draft_probs: unused, a greedy draft is a point mass.
        uniforms: unused, nothing is drawn.
    """
    choices = target_scores.argmax(dim=-1)
    lookahead = draft_tokens.shape[1]
    agreed = (choices[:, :lookahead] == draft_tokens) & _drafted(lengths, lookahead)
    n_accepted = _leading(agreed)
    next_token = choices.gather(1, n_accepted.unsqueeze(1)).squeeze(1)
    return Verification(n_accepted, next_token, agreed.float())


def speculative_sampling(
    target_probs: Tensor,
    draft_tokens: Tensor,
    lengths: Tensor,
    draft_probs: Tensor | None,
    uniforms: Tensor | None,
) -> Verification:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1): the output is distributed as the target's own.

    A drafted token x is kept with probability min(1, p(x) / q(x)); the first that is not gives way to a draw
    from max(0, p - q), normalised; after a full acceptance the target's last distribution is drawn from.

    Args:
        target_probs: `[B, γ+1, V]`, p at each drafted position and one beyond.
        draft_tokens: `[B, γ]`, drawn from `draft_probs`; positions past a row's length are ignored.
        lengths: `[B]`, drafted tokens of each row.
        draft_probs: `[B, γ, V]`, q; None where each draft is a point mass on its token.
        uniforms: `[B, γ+1]`, in [0, 1): one for each acceptance, the last for the draw of the next token.
    """
    assert uniforms is not None
    lookahead = draft_tokens.shape[1]
    drafted = _drafted(lengths, lookahead)
    p_token = _of_tokens(target_probs, draft_tokens)
    bar = uniforms[:, :lookahead]
    if draft_probs is not None:
        bar = bar * _of_tokens(draft_probs, draft_tokens)
    excess = _excess(target_probs, draft_tokens, drafted, draft_probs)
    n_accepted = _leading((bar < p_token) & drafted)
    next_token = _draw_next(target_probs, excess, n_accepted, uniforms[:, -1])
    return Verification(n_accepted, next_token, 1.0 - excess[:, :lookahead].sum(dim=2))


def block_verification(
    target_probs: Tensor,
    draft_tokens: Tensor,
    lengths: Tensor,
    draft_probs: Tensor | None,
    uniforms: Tensor | None,
) -> Verification:
    """Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2): lossless, and keeps no fewer tokens.

    Drafts are judged together, the longest block that passes is kept. With P_0 = 1 and P_i = min(1, P_{i-1} p/q)
    of token i, the first i drafts pass with probability h_i = S_i / (S_i + 1 - P_i), where S_i is the sum of
    max(0, P_i p - q) over the token after them, and all of them with P_γ. The next token is drawn from
    max(0, P_i p - q), normalised. Where to stop drafting may depend on the drafts so far, row by row: the proof
    needs no more than P(kept >= i | drafts up to i) = P_i, which holds at the end of a row's drafts by definition.

    Arguments as `speculative_sampling`: i-th uniform number for the first i drafts, the last for the next token.
    """
    assert uniforms is not None
    lookahead = draft_tokens.shape[1]
    drafted = _drafted(lengths, lookahead)
    p_token = _of_tokens(target_probs, draft_tokens)
    q_token = torch.ones_like(p_token) if draft_probs is None else _of_tokens(draft_probs, draft_tokens)
    block = [torch.ones_like(uniforms[:, 0])]
    for ratio in (p_token / q_token).unbind(1):
        block.append((block[-1] * ratio).clamp(max=1.0))
    passes = torch.stack(block, dim=1)
    excess = _excess(passes.unsqueeze(2) * target_probs, draft_tokens, drafted, draft_probs)
    # Blocks of 1 to γ drafts; the whole draft is followed by no other that could be better.
    ends = torch.arange(1, lookahead + 1, device=lengths.device)
    whole = ends == lengths.unsqueeze(1)
    kept, rest = passes[:, 1:], excess[:, 1:].sum(dim=2)
    bar = torch.where(whole, kept, rest)
    total = torch.where(whole, 1.0, rest + 1.0 - kept)
    accepted = (uniforms[:, :lookahead] * total < bar) & drafted
    n_accepted = (accepted * ends).amax(dim=1) if lookahead else torch.zeros_like(lengths)
    next_token = _draw_next(target_probs, excess, n_accepted, uniforms[:, -1])
    unscaled = _excess(target_probs, draft_tokens, drafted, draft_probs)
    return Verification(n_accepted, next_token, 1.0 - unscaled[:, :lookahead].sum(dim=2))


SAMPLING_RULES: dict[str, Rule] = {"token": speculative_sampling, "block": block_verification}


def _drafted(lengths: Tensor, lookahead: int) -> Tensor:
    """`[B, γ]`: whether the position holds one of the row's drafted tokens."""
    return torch.arange(lookahead, device=lengths.device) < lengths.unsqueeze(1)


def _leading(accepted: Tensor) -> Tensor:
    """`[B]`: how many positions are true before the first false one."""
    return accepted.cumprod(dim=1).sum(dim=1)


def _of_tokens(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs.gather(2, tokens.unsqueeze(2)).squeeze(2)


def _excess(target_probs: Tensor, draft_tokens: Tensor, drafted: Tensor, draft_probs: Tensor | None) -> Tensor:
    """`[B, γ+1, V]`: max(0, p - q) where a token was drafted, from q or as a point mass; elsewhere p itself."""
    if draft_probs is None:
        kept = _of_tokens(target_probs, draft_tokens) * ~drafted
        return target_probs.scatter(2, draft_tokens.unsqueeze(2), kept.unsqueeze(2))
    q = torch.nn.functional.pad(draft_probs * drafted.unsqueeze(2), (0, 0, 0, 1))
    return (target_probs - q).clamp_(min=0.0)


def _draw_next(target_probs: Tensor, excess: Tensor, n_accepted: Tensor, uniform: Tensor) -> Tensor:
    """`[B]`: the token after the accepted ones, from what p exceeds q by there."""
    rows = torch.arange(len(n_accepted), device=n_accepted.device)
    # A rejection where p and q agree to the last bit leaves nothing to draw from; its odds are rounding's. There p
    # itself is drawn from, and elsewhere this weight is lost in rounding.
    return draw(excess[rows, n_accepted].add(target_probs[rows, n_accepted], alpha=_NEXT_TO_NOTHING), uniform)
