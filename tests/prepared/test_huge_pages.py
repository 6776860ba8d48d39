"""Tensors are moved into huge pages where they lie: same addresses, same values, nothing beyond their memory."""

import itertools

import pytest
import torch
from helpers.int8_weights import Int8Weight
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.prepared import huge_pages
from hf_specdec.prepared.huge_pages import NEAR, PIECE, HugePages, page_size, spans_of

PAGE = 2**21


def _large() -> torch.Tensor:
    """8 MiB."""
    return torch.arange(2**21, dtype=torch.float32)


class Kernel:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[range] = []

    def __call__(self, address: int, size: int) -> None:
        self.asked.append(range(address, address + size))


@given(st.lists(st.tuples(st.integers(0, 2**26), st.integers(1, 2**24)), max_size=8))
def test_spans_are_whole_pages_of_the_blocks_and_what_lies_between_near_ones(blocks: list[tuple[int, int]]) -> None:
    spans = sorted(spans_of(blocks, PAGE), key=lambda span: span.start)
    assert all(span.start % PAGE == span.stop % PAGE == 0 for span in spans)
    assert all(one.stop <= other.start for one, other in itertools.pairwise(spans))
    covered = [range(start - NEAR // 2, start + size + NEAR // 2 + 1) for start, size in blocks]
    for span in spans:
        for address in range(span.start, span.stop, NEAR):
            assert any(address in block for block in covered)
    for start, size in blocks:
        for page in range(-(-start // PAGE) * PAGE, (start + size) // PAGE * PAGE, PAGE):
            assert any(page in span for span in spans)


def test_blocks_that_are_not_near_each_other_are_not_joined() -> None:
    half = PAGE // 2
    assert spans_of([(half, half), (PAGE, half)], PAGE) == []
    assert spans_of([(0, half), (half + NEAR, half)], PAGE) == [range(0, PAGE)]
    assert spans_of([(0, half), (half + NEAR + 1, half)], PAGE) == []


def test_a_call_without_time_left_asks_for_nothing_and_the_next_one_goes_on() -> None:
    kernel, large = Kernel(), _large()
    pages = HugePages([large, torch.ones(8)], PAGE, kernel)
    pages.gather(seconds=0.0)
    assert kernel.asked == []
    pages.gather()
    (span,) = kernel.asked
    assert large.data_ptr() <= span.start < span.stop <= large.data_ptr() + large.nbytes
    pages.gather()
    assert kernel.asked == [span]


def test_a_quantized_weight_s_numbers_are_moved() -> None:
    kernel, weight = Kernel(), Int8Weight.of(torch.ones(2**12, 2**11))
    weight.__tensor_flatten__ = lambda: (["values", "scales"], None)  # type: ignore[attr-defined]
    HugePages([weight], PAGE, kernel).gather()
    (span,) = kernel.asked
    assert weight.values.data_ptr() <= span.start < span.stop <= weight.values.data_ptr() + weight.values.nbytes


def test_every_piece_is_asked_for_once(monkeypatch) -> None:
    """Also behind one that the kernel refuses."""
    spans = [range(0, 3 * PIECE), range(4 * PIECE, 5 * PIECE + PAGE)]
    monkeypatch.setattr(huge_pages, "spans_of", lambda blocks, page: list(spans))
    kernel = Kernel()
    pages = HugePages([], PAGE, kernel)
    for _ in range(2):
        pages.gather()
    expected = [*(range(at * PIECE, (at + 1) * PIECE) for at in (0, 1, 2, 4)), range(5 * PIECE, 5 * PIECE + PAGE)]
    assert sorted(kernel.asked, key=lambda span: span.start) == expected


def test_tensors_of_other_devices_are_left_alone() -> None:
    kernel = Kernel()
    HugePages([torch.ones(2**22, device="meta")], PAGE, kernel).gather()
    assert kernel.asked == []


def test_moving_changes_neither_addresses_nor_values() -> None:
    large = _large()
    before = large.data_ptr()
    HugePages([large]).gather()
    assert large.data_ptr() == before
    assert torch.equal(large, torch.arange(2**21, dtype=torch.float32))


@pytest.mark.parametrize(("enabled", "expected"), [
    ("always [madvise] never", PAGE), ("[always] madvise never", PAGE), ("always madvise [never]", None),
    (None, None),
])  # fmt: skip
def test_an_administrator_can_forbid_huge_pages(
    enabled: str | None, expected: int | None, tmp_path, monkeypatch
) -> None:
    if enabled is not None:
        (tmp_path / "enabled").write_text(enabled)
        (tmp_path / "hpage_pmd_size").write_text(f"{PAGE}\n")
    monkeypatch.setattr(huge_pages, "_SYSTEM", tmp_path)
    assert page_size.__wrapped__() == expected
