"""Weights keep addresses and values in huge pages; ranges cover the weights that they are made for, once each."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch
from torch import nn

from hf_specdec.models import huge_pages
from hf_specdec.models.huge_pages import PAGE_BYTES, page_ranges, use_huge_pages


def test_weights_stay_where_and_what_they_are() -> None:
    model = nn.Linear(1024, 2048)
    before, address = model.weight.detach().clone(), model.weight.data_ptr()
    assert use_huge_pages(model) % PAGE_BYTES == 0
    assert model.weight.data_ptr() == address and torch.equal(model.weight, before)


def test_ranges_cover_every_weight_in_whole_pages_without_overlap() -> None:
    whole = torch.zeros(3 * PAGE_BYTES // 4)
    first, second, apart = whole[:100], whole[100 : PAGE_BYTES // 2], torch.zeros(2 * PAGE_BYTES)
    ranges = page_ranges([second, first, apart])
    assert all(at % PAGE_BYTES == 0 for span in ranges for at in span)
    assert all(end < start for (_, end), (start, _) in pairwise(ranges))
    for weight in (first, second, apart):
        covering = [s for s, e in ranges if s <= weight.data_ptr() and weight.data_ptr() + weight.nbytes <= e]
        assert len(covering) == 1
    # Neighbours share a range; what is no memory of a CPU has none.
    assert page_ranges([first, second]) == page_ranges([whole[: PAGE_BYTES // 2]])
    assert page_ranges([torch.zeros(4, device="meta"), torch.zeros(0)]) == []


def test_nothing_is_asked_of_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(huge_pages, "page_ranges", lambda weights: pytest.fail("asked"))
    assert use_huge_pages(nn.Linear(2, 2)) == 0
