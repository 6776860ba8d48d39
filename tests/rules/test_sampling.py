"""Uniform numbers and draws: independent of the default dtype, and no token from scores that define none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_specdec.rules.sampling import draw, uniforms


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_draws_do_not_depend_on_the_default_dtype(bfloat16_by_default) -> None:
    """In bfloat16 a token of probability 0.001 came with 0.0029; 20 standard deviations are allowed here."""
    torch.manual_seed(0)
    numbers = uniforms(1_000_000, device=torch.device("cpu"))
    assert numbers.dtype == torch.float32
    weights = torch.tensor([0.999, 0.001], dtype=torch.float32).expand(len(numbers), 2)
    share = draw(weights, numbers).double().mean().item()
    assert abs(share - 0.001) < 20 * (0.001 / len(numbers)) ** 0.5


@pytest.mark.parametrize("weights", [[0.5, float("nan")], [0.0, 0.0], [float("inf"), 1.0]])
def test_weights_that_are_no_distribution_give_no_token(weights: list[float]) -> None:
    rows = torch.tensor([weights, [0.5, 0.5]])
    assert draw(rows, torch.tensor([0.7, 0.7])).tolist() == [-1, 1]
