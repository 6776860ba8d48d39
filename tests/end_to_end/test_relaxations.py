"""Lenience, typical acceptance and the ensemble: what they keep, their limits, and transformers' own ensemble.

That their limits keep the distribution in sampling is shown in `test_output_distributions.py`.
"""

import math
from typing import Any

import pytest
import torch
from helpers.models import encoder_prompts, llama, noisy, prompts, t5
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import SpeculativeDecoding
from hf_specdec.host.relaxations import Ensemble, LenientArgmax, TypicalAcceptance
from hf_specdec.rules.sampling import probabilities
from hf_specdec.rules.verification import SAMPLING_RULES, Lenient, Rule, speculative_sampling

NEW_TOKENS = 24
LIMITS: list[tuple[str, str, float, float]] = [  # the setting, where it is lossless, and where it accepts everything
    ("lenient", "lenience", 1.0, 0.0),
    ("typical", "posterior_threshold", math.inf, 0.0),
    ("ensemble", "assistant_ensemble_weight", 1.0, 0.0),
]
P = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
Q = torch.tensor([0.1, 0.6, 0.1, 0.2], dtype=torch.float64)
ONE = torch.tensor([1])


@pytest.fixture(scope="module", params=["llama", "t5"])
def family(request) -> tuple[PreTrainedModel, PreTrainedModel, dict[str, Tensor]]:
    target, inputs = (llama(), prompts(4)) if request.param == "llama" else (t5(), encoder_prompts(4))
    return target, noisy(target), inputs


@pytest.mark.parametrize(("strategy", "setting", "lossless", "everything"), LIMITS, ids=lambda value: str(value))
def test_greedy_output_at_both_limits(family: Any, strategy: str, setting: str, lossless: float, everything: float):
    """A ragged batch in float64: the target's own at one limit, every draft at the other."""
    target, draft, inputs = family
    call = {**inputs, "do_sample": False, "max_new_tokens": NEW_TOKENS}
    plain = target.generate(**call)
    rates = []
    for value in (lossless, everything):
        decoding = SpeculativeDecoding(draft, strategy, num_assistant_tokens=4, **{setting: value})
        output = target.generate(**call, custom_generate=decoding)
        assert torch.equal(output, plain) == (value == lossless)
        rates.append(decoding.stats.acceptance_rate)
    assert 0 < rates[0] < rates[1] == 1.0


def kept(relaxation: LenientArgmax | TypicalAcceptance, token: int) -> bool:
    """Whether a drafted token becomes certain; the position after it stays as it was."""
    scores = P.log().expand(1, 2, 4)
    relaxed = relaxation.relax(scores, torch.tensor([[token]]), ONE)
    assert torch.equal(relaxed[:, 1], scores[:, 1])
    assert torch.equal(relaxed[:, 0], scores[:, 0]) != bool(relaxed[0, 0, token] == 0)
    return bool(relaxed[0, 0, token] == 0)


def test_lenient_argmax_keeps_what_exceeds_its_share_of_the_maximum() -> None:
    """Shares of the maximum: 1, 0.6, 0.4, 0."""
    assert kept(LenientArgmax(0.599), 1) and not kept(LenientArgmax(0.601), 1)
    assert kept(LenientArgmax(0.0), 2) and not kept(LenientArgmax(0.0), 3)
    assert not kept(LenientArgmax(1.0), 0), "left to the rule, which accepts it: so that ties stay the target's"


def test_typical_acceptance_keeps_what_exceeds_both_thresholds() -> None:
    entropy = -sum(p * math.log(p) for p in P.tolist() if p)
    assert math.exp(-entropy) > 0.2
    hard = 0.2**2 / math.exp(-2 * entropy)  # √ε exp(-H) = 0.2, below ε
    assert hard > 0.2
    assert kept(TypicalAcceptance(hard * 0.999), 2) and not kept(TypicalAcceptance(hard * 1.001), 2)
    certain = torch.tensor([[[0.0, -40.0], [0.0, 0.0]]], dtype=torch.float64)
    # H = 0: the lower bound is ε itself.
    for token, stands in ((0, True), (1, False)):
        relaxed = TypicalAcceptance(0.09).relax(certain, torch.tensor([[token]]), ONE)
        assert bool((relaxed[0, 0] == -torch.inf).any()) == stands
    assert kept(TypicalAcceptance(0.0), 2) and not kept(TypicalAcceptance(0.0), 3)


def one_token(rule: Rule, target: Tensor, draft: Tensor) -> Tensor:
    """The distribution of the token at one drafted position, by integration over uniform numbers."""
    steps = 400
    grid = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    uniforms = torch.cartesian_prod(grid, grid)
    rows, found = len(uniforms), torch.zeros(4, dtype=torch.float64)
    for token in range(4):
        drafts = torch.full((rows, 1), token)
        judged = rule(
            torch.stack([target, target]).expand(rows, -1, -1),
            drafts,
            torch.ones(rows, dtype=torch.long),
            draft.expand(rows, 1, -1),
            uniforms,
        )
        written = torch.where(judged.n_accepted == 1, drafts[:, 0], judged.next_token)
        found += draft[token] * torch.bincount(written, minlength=4) / rows
    return found


@pytest.mark.parametrize("lenience", [1.0, 0.6, 0.25, 0.0])
def test_lenience_bounds_every_token(lenience: float) -> None:
    """Accepted is min(q, p / l); what is left is drawn from max(0, p - q), normalised; no token exceeds p / l."""
    found = one_token(Lenient(speculative_sampling, lenience), P, Q)
    accepted = torch.minimum(Q, P / lenience) if lenience else Q * (P > 0)
    residual = (P - Q).clamp(min=0)
    expected = accepted + (1 - accepted.sum()) * residual / residual.sum()
    assert found.tolist() == pytest.approx(expected.tolist(), abs=0.01)
    assert bool((found * lenience <= P + 0.01).all())
    assert found[3] == 0, "what the target rules out never comes"
    if lenience < 1:
        assert found.tolist() != pytest.approx(P.tolist(), abs=0.01)


@pytest.mark.parametrize("name", SAMPLING_RULES)
@pytest.mark.parametrize("weight", [1.0, 0.7, 0.0])
def test_an_ensemble_s_token_is_distributed_as_the_mixture(weight: float, name: str) -> None:
    def rule(target: Tensor, drafts: Tensor, lengths: Tensor, draft_probs: Tensor | None, uniforms: Tensor | None):
        scores = Ensemble(weight).relax(target.log(), drafts, lengths, draft_probs)
        assert torch.equal(scores[:, 1:], target.log()[:, 1:]), "after a whole draft the target decides"
        return SAMPLING_RULES[name](probabilities(scores), drafts, lengths, draft_probs, uniforms)

    assert one_token(rule, P, Q).tolist() == pytest.approx((weight * P + (1 - weight) * Q).tolist(), abs=0.01)


def test_an_ensemble_leaves_undrafted_positions_and_its_limit_exactly_alone() -> None:
    torch.manual_seed(0)
    scores, probs = torch.randn(2, 4, 5), torch.rand(2, 3, 5)
    tokens, lengths = torch.zeros(2, 3, dtype=torch.long), torch.tensor([1, 0])
    relaxed = Ensemble(0.3).relax(scores, tokens, lengths, probs)
    assert torch.equal(relaxed[0, 1:], scores[0, 1:]) and torch.equal(relaxed[1], scores[1])
    assert not torch.equal(relaxed[0, 0], scores[0, 0])
    assert torch.equal(Ensemble(1.0).relax(scores, tokens, torch.tensor([3, 3]), probs), scores)


@pytest.mark.skipif(
    not hasattr(GenerationConfig(), "assistant_ensemble_weight"), reason="this transformers has no ensemble"
)
@pytest.mark.parametrize("weight", [0.3, 0.6])
def test_greedy_ensembles_are_those_of_transformers(weight: float) -> None:
    """The same tokens as its own assisted loop, whose rounds are drafted alike."""
    target = llama()
    draft = noisy(target)
    draft.generation_config.update(
        num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    changed = []
    for seed in range(4):
        call = {**prompts(1, seed=seed), "do_sample": False, "max_new_tokens": NEW_TOKENS}
        theirs = target.generate(**call, assistant_model=draft, assistant_ensemble_weight=weight)
        ours = SpeculativeDecoding(draft, "ensemble", num_assistant_tokens=4, assistant_ensemble_weight=weight)
        assert torch.equal(target.generate(**call, custom_generate=ours), theirs)
        changed.append(not torch.equal(theirs, target.generate(**call)))
    assert any(changed)
