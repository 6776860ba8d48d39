"""The losses of `--task align` against their definitions, in float64."""

import math

import pytest
import torch
from torch import Tensor

from hf_specdec.bench.aligning.losses import (
    DIVERGENCES,
    cross_entropy,
    forward_kl,
    on_tokens,
    reverse_kl,
    total_variation,
)
from hf_specdec.rules.verification import speculative_sampling

N, V = 6, 9


@pytest.fixture
def logits() -> tuple[Tensor, Tensor]:
    """Those of the draft and of the target, `[N, V]`."""
    torch.manual_seed(0)
    return torch.randn(N, V, dtype=torch.float64) * 2, torch.randn(N, V, dtype=torch.float64) * 2


def log_probabilities(logits: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return logits[0].log_softmax(-1), logits[1].log_softmax(-1)


def test_divergences_are_the_sums_that_define_them(logits: tuple[Tensor, Tensor]) -> None:
    draft, target = log_probabilities(logits)
    found = {name: divergence(draft, target) for name, divergence in DIVERGENCES.items()}
    share = math.exp(-3 * (1 - float(found["total_variation"].mean())))
    for n in range(N):
        pairs = [(math.exp(target[n, v]), math.exp(draft[n, v])) for v in range(V)]
        sums = {
            "forward_kl": sum(p * math.log(p / q) for p, q in pairs),
            "reverse_kl": sum(q * math.log(q / p) for p, q in pairs),
            "total_variation": sum(abs(p - q) for p, q in pairs) / 2,
        }
        sums["lk_hybrid"] = share * sums["forward_kl"] + (1 - share) * sums["total_variation"]
        assert {name: float(values[n]) for name, values in found.items()} == pytest.approx(sums, abs=1e-12)
    assert not torch.allclose(found["forward_kl"], found["reverse_kl"]), "they tell the two sides apart"
    assert all(bool((divergence(target, target).abs() < 1e-12).all()) for divergence in DIVERGENCES.values())


def test_total_variation_is_the_chance_that_the_lossless_rule_rejects(logits: tuple[Tensor, Tensor]) -> None:
    fine = 2000  # uniform numbers, evenly spread, for each drafted token
    draft, target = (side.exp() for side in log_probabilities(logits))
    rejected = []
    for p, q in zip(target, draft, strict=True):
        tokens = torch.arange(V).repeat_interleave(fine).unsqueeze(-1)
        numbers = ((torch.arange(fine) + 0.5) / fine).repeat(V)
        verified = speculative_sampling(
            p.expand(V * fine, 2, V), tokens, torch.ones(V * fine, dtype=torch.long), q.expand(V * fine, 1, V),
            numbers.unsqueeze(-1).expand(-1, 2),
        )  # fmt: skip
        shares = verified.n_accepted.view(V, fine).double().mean(-1)
        rejected.append(float(1 - (q * shares).sum()))
    found = total_variation(*log_probabilities(logits))
    assert found.tolist() == pytest.approx(rejected, abs=1 / fine)
    assert found.tolist() != pytest.approx(forward_kl(*log_probabilities(logits)).tolist(), abs=1 / fine)


def test_on_one_hot_targets_forward_kl_has_the_gradient_of_cross_entropy(logits: tuple[Tensor, Tensor]) -> None:
    tokens = torch.tensor([3, 0, 8, 1, 1, 5])
    one_hot = torch.full((N, V), -torch.inf, dtype=torch.float64).scatter(-1, tokens.unsqueeze(-1), 0.0)
    draft = logits[0].log_softmax(-1)
    torch.testing.assert_close(forward_kl(draft, one_hot), cross_entropy(draft, tokens), atol=1e-12, rtol=0)
    gradients = []
    for loss, wanted in ((forward_kl, one_hot), (cross_entropy, tokens), (total_variation, one_hot)):
        free = logits[0].clone().requires_grad_()
        loss(free.log_softmax(-1), wanted).sum().backward()
        gradients.append(free.grad)
    assert gradients[0] is not None and gradients[1] is not None and gradients[2] is not None
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-12, rtol=0)
    assert not torch.allclose(gradients[0], gradients[2], atol=1e-3)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_of_all_tokens_the_stored_distribution_is_the_full_one(name: str, logits: tuple[Tensor, Tensor]) -> None:
    tokens = logits[1].topk(V).indices
    draft, target = (on_tokens(side, tokens) for side in logits)
    assert draft.shape == (N, V)
    full = DIVERGENCES[name](*log_probabilities(logits))
    torch.testing.assert_close(DIVERGENCES[name](draft, target), full, atol=1e-12, rtol=0)
    fewer = logits[1].topk(2).indices
    assert not torch.allclose(DIVERGENCES[name](*(on_tokens(side, fewer) for side in logits)), full)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_more_tokens_come_closer_to_the_full_divergence_from_below(name: str, logits: tuple[Tensor, Tensor]) -> None:
    found = []
    for count in range(1, V + 1):
        tokens = logits[1].topk(count).indices
        found.append(DIVERGENCES[name](*(on_tokens(side, tokens) for side in logits)))
    steps = torch.stack(found).diff(dim=0)
    assert bool((steps >= -1e-12).all()) and bool((steps > 1e-6).any())


def test_the_rest_is_one_outcome_with_the_mass_of_all_other_tokens(logits: tuple[Tensor, Tensor]) -> None:
    tokens = logits[1].topk(3).indices
    found = on_tokens(logits[0], tokens).exp()
    assert found.shape == (N, 4)
    full = logits[0].softmax(-1)
    torch.testing.assert_close(found[:, :3], full.gather(-1, tokens), atol=1e-12, rtol=0)
    torch.testing.assert_close(found[:, 3], full.scatter(-1, tokens, 0.0).sum(-1), atol=1e-12, rtol=0)


def test_a_tiny_rest_keeps_its_mass_and_its_gradient() -> None:
    """1 minus the sum of the others would be 0 in float32, and its logarithm infinite."""
    free = torch.tensor([[60.0, 0.0, -1.0]], requires_grad=True)
    kept = on_tokens(free, torch.tensor([[0]]))
    assert 1 - float(kept[0, 0].detach().exp()) == 0
    assert float(kept[0, 1].detach()) == pytest.approx(math.log(1 + math.exp(-1)) - 60, abs=1e-4)
    reverse_kl(kept, torch.tensor([[-1.0, math.log(1 - math.exp(-1))]])).sum().backward()
    assert free.grad is not None and bool(free.grad.isfinite().all())
