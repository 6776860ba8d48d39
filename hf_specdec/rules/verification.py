"""Acceptance rules: pure functions from both models' distributions to the accepted tokens; lossless except `Lenient`.

All rules share one signature. Forward passes, caches, ends of sequences and strategies are handled elsewhere;
relaxations such as BiLD's change the target's scores before a rule sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.rules.sampling import draw

# Factor for a probability: the product is above zero in float32, yet far below the rounding error of a sum.
_NEXT_TO_NOTHING = 1e-25


@dataclass(frozen=True)
class Verification:
    """A rule's result.

    Args:
        n_accepted: `[B]`, drafted tokens kept.
        next_token: `[B]`, the target's own token after them; -1 if it cannot be drawn, see `sampling.draw`.
        overlap: `[B, γ]`, Σ_x min(p(x), q(x)) at each drafted position; arbitrary past a row's length.
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
        draft_probs: unused; a greedy draft is a point mass.
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

    A drafted token x is kept with probability min(1, p(x) / q(x)). The first rejected token is replaced by a draw
    from max(0, p - q), normalised. After a full acceptance the next token is drawn from the target's distribution.

    Args:
        target_probs: `[B, γ+1, V]`, p at each drafted position and one beyond.
        draft_tokens: `[B, γ]`, drawn from `draft_probs`; positions past a row's length are ignored.
        lengths: `[B]`, drafted tokens of each row.
        draft_probs: `[B, γ, V]`, q; None where each draft is a point mass on its token.
        uniforms: `[B, γ+1]`, in [0, 1): one for each acceptance, the last for the draw of the next token.
    """
    assert uniforms is not None
    lookahead = draft_tokens.shape[1]
    p_token, q_token, overlap = _at_drafts(target_probs, draft_tokens, draft_probs)
    n_accepted = _leading((uniforms[:, :lookahead] * q_token < p_token) & _drafted(lengths, lookahead))
    weights = _residual(target_probs, draft_tokens, lengths, draft_probs, n_accepted)
    return Verification(n_accepted, draw(weights, uniforms[:, -1]), overlap)


def block_verification(
    target_probs: Tensor,
    draft_tokens: Tensor,
    lengths: Tensor,
    draft_probs: Tensor | None,
    uniforms: Tensor | None,
) -> Verification:
    """Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2): lossless, and keeps no fewer tokens.

    Drafts are judged together, and the longest block that passes is kept. Let P_0 = 1 and P_i = min(1, P_{i-1} p/q)
    for token i. The first i drafts pass with probability h_i = S_i / (S_i + 1 - P_i), where S_i is the sum of
    max(0, P_i p - q) over the token after them; all γ pass with probability P_γ. The next token is drawn from
    max(0, P_i p - q), normalised. A row's draft length may depend on its drafts so far: the proof only needs
    P(kept >= i | drafts up to i) = P_i, which holds at the end of a draft by definition.

    Arguments as `speculative_sampling`: the i-th uniform number judges the first i drafts, the last draws the token.
    """
    assert uniforms is not None
    lookahead = draft_tokens.shape[1]
    p_token, q_token, overlap = _at_drafts(target_probs, draft_tokens, draft_probs)
    products = [torch.ones_like(uniforms[:, 0])]
    for ratio in (p_token / q_token).unbind(1):
        products.append((products[-1] * ratio).clamp(max=1.0))
    passes = torch.stack(products, dim=1)
    # Blocks of 1 to γ drafts. No longer block competes with the whole draft, so it passes with its own probability.
    ends = torch.arange(1, lookahead + 1, device=lengths.device)
    whole = ends == lengths.unsqueeze(1)
    kept, rest = passes[:, 1:], _block_residuals(target_probs, draft_tokens, draft_probs, passes)
    bar = torch.where(whole, kept, rest)
    total = torch.where(whole, 1.0, rest + 1.0 - kept)
    accepted = (uniforms[:, :lookahead] * total < bar) & _drafted(lengths, lookahead)
    n_accepted = (accepted * ends).amax(dim=1) if lookahead else torch.zeros_like(lengths)
    weights = _residual(target_probs, draft_tokens, lengths, draft_probs, n_accepted, passes)
    return Verification(n_accepted, draw(weights, uniforms[:, -1]), overlap)


@dataclass(frozen=True)
class Lenient:
    """Lenience in sampling (Leviathan et al. 2023, appendix A.5): keep drafts with probability min(1, p / (l q)).

    Calls the wrapped rule with smaller uniform numbers: u l q < p instead of u q < p. A rejected token is replaced as
    before, so no token is drawn with more than 1 / l times its probability. With block verification, the probability
    that a block passes is divided by l. The overlap is that of the wrapped rule.

    Args:
        rule: a rule of `SAMPLING_RULES`.
        lenience: l in [0, 1]; 1 is lossless, 0 keeps every token that the target does not rule out.
    """

    rule: Rule
    lenience: float

    def __call__(
        self,
        target_probs: Tensor,
        draft_tokens: Tensor,
        lengths: Tensor,
        draft_probs: Tensor | None,
        uniforms: Tensor | None,
    ) -> Verification:
        """Arguments as `speculative_sampling`."""
        assert uniforms is not None
        judging = torch.cat([uniforms[:, :-1] * self.lenience, uniforms[:, -1:]], dim=1)
        return self.rule(target_probs, draft_tokens, lengths, draft_probs, judging)


SAMPLING_RULES: dict[str, Rule] = {"token": speculative_sampling, "block": block_verification}


def _drafted(lengths: Tensor, lookahead: int) -> Tensor:
    """`[B, γ]`: whether the position holds one of the row's drafted tokens."""
    return torch.arange(lookahead, device=lengths.device) < lengths.unsqueeze(1)


def _leading(accepted: Tensor) -> Tensor:
    """`[B]`: how many positions are true before the first false one."""
    return accepted.cumprod(dim=1).sum(dim=1)


def _at_drafts(
    target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None
) -> tuple[Tensor, Tensor | float, Tensor]:
    """p and q of the drafted tokens, each `[B, γ]`, and Σ_x min(p(x), q(x)) `[B, γ]`; q is 1 for point masses."""
    tokens = draft_tokens.unsqueeze(2)
    p_token = target_probs.gather(2, tokens).squeeze(2)
    if draft_probs is None:
        return p_token, 1.0, p_token
    overlap = torch.minimum(target_probs[:, : draft_probs.shape[1]], draft_probs).sum(dim=2)
    return p_token, draft_probs.gather(2, tokens).squeeze(2), overlap


def _block_residuals(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, passes: Tensor) -> Tensor:
    """`[B, γ]`: S_i = Σ_x max(0, P_i p(x) - q(x)) after the first i drafts, i = 1 … γ; after all γ arbitrary."""
    lookahead = draft_tokens.shape[1]
    residuals = passes[:, 1:lookahead].unsqueeze(2) * target_probs[:, 1:lookahead]
    # In place: at a large vocabulary each copy of `[B, γ, V]` takes hundreds of megabytes.
    if draft_probs is None:
        residuals.scatter_(2, draft_tokens[:, 1:].unsqueeze(2), 0.0)
    else:
        residuals.sub_(draft_probs[:, 1:]).clamp_(min=0.0)
    return torch.nn.functional.pad(residuals.sum(dim=2), (0, min(lookahead, 1)))


def _residual(
    target_probs: Tensor,
    draft_tokens: Tensor,
    lengths: Tensor,
    draft_probs: Tensor | None,
    n_accepted: Tensor,
    passes: Tensor | None = None,
) -> Tensor:
    """`[B, V]`: the weights of the token after the accepted ones.

    max(0, P p - q) where a draft was rejected, with P from `passes` `[B, γ+1]` or 1; p after a full acceptance.
    """
    rows = torch.arange(len(n_accepted), device=n_accepted.device)
    p = residual = target_probs[rows, n_accepted]
    if draft_tokens.shape[1]:
        if passes is not None:
            residual = residual * passes[rows, n_accepted].unsqueeze(1)
        rejected = (n_accepted < lengths).unsqueeze(1)
        place = n_accepted.clamp(max=draft_tokens.shape[1] - 1)
        if draft_probs is None:
            token = draft_tokens[rows, place].unsqueeze(1)
            residual = residual.scatter(1, token, residual.gather(1, token) * ~rejected)
        else:
            residual = torch.where(rejected, (residual - draft_probs[rows, place]).clamp_(min=0.0), p)
    # If p and q agree to the last bit, a rejection leaves nothing to draw from. Then the scaled p decides, which is
    # otherwise too small to change the sum.
    return residual.add(p, alpha=_NEXT_TO_NOTHING)
