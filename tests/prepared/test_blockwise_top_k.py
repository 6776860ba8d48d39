"""The k-th best score among the best blocks is the k-th best of all, wherever it stands."""

from __future__ import annotations

import pytest
import torch
from transformers import TopKLogitsWarper

from hf_specdec.prepared.blockwise_top_k import keep_top_k, kth_best

SHAPES = [(1, 1), (7, 3), (97, 1), (100, 6), (2048, 50), (2051, 50), (5000, 3), (640, 40)]


def _scores(kind: str, width: int) -> torch.Tensor:
    scores = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    if kind == "ties":
        return scores.round()
    if kind == "rising":  # the best are neighbours
        return scores.sort(dim=-1).values
    if kind == "mostly hidden":
        return scores.masked_fill(torch.arange(width) % 9 != 0, -torch.inf)
    return scores


@pytest.mark.parametrize(("width", "k"), SHAPES)
@pytest.mark.parametrize("kind", ["any", "ties", "rising", "mostly hidden"])
def test_it_is_the_kth_best_of_all(width: int, k: int, kind: str) -> None:
    scores = _scores(kind, width)
    assert torch.equal(kth_best(scores, k), scores.topk(k).values[:, -1:])


@pytest.mark.parametrize("apart", [1, 6, 34])
def test_it_finds_the_best_in_one_block_and_in_as_many_as_can_be(apart: int) -> None:
    """34 blocks of 8 scores, which stand 34 apart: the best stand in six of them, in some, or in one."""
    scores = torch.zeros(1, 8 * 34)
    scores[0, torch.arange(0, 6 * apart, apart)] = torch.arange(1.0, 7.0)
    assert kth_best(scores, 6).item() == 1.0
    assert kth_best(scores, 7).item() == 0.0


@pytest.mark.parametrize("k", [1, 50, 2048, 9999])
def test_scores_are_what_transformers_makes_of_them(k: int) -> None:
    processor = TopKLogitsWarper(k, filter_value=-1e4)
    scores = _scores("ties", 2048)
    assert torch.equal(keep_top_k(processor, scores), processor(torch.zeros(3, 1, dtype=torch.long), scores))
