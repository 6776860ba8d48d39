"""Precomputed masks: the model's own result, and no table over all pairs of a prompt's tokens."""

from __future__ import annotations

import pytest
import torch
from helpers.families import pair, prompts
from helpers.identity import same_as_plain
from torch import Tensor
from transformers import DynamicCache

from hf_specdec.models.cache_names import CACHE_NAME
from hf_specdec.models.dynamic_runner import DynamicRunner
from hf_specdec.models.masks import MAX_MASKED_TOKENS, CausalMasks, SlotMasks, attention_mask


@pytest.mark.parametrize("width", [2, 5, MAX_MASKED_TOKENS, MAX_MASKED_TOKENS + 8])
def test_passes_behind_the_prompt_give_the_logits_of_one_pass_over_all(width: int) -> None:
    """Wider passes than tables are kept for, as of a draft that catches up, too."""
    target, _ = pair("llama")
    ids = torch.randint(3, 48, (1, 7 + width), generator=torch.Generator().manual_seed(0))
    runner = DynamicRunner(target, {CACHE_NAME: DynamicCache(), "use_cache": True}, ids[:, :7], 100)
    runner.forward(ids[:, :7], 1)
    with torch.no_grad():
        wanted = target(ids).logits[:, -width:]
    torch.testing.assert_close(runner.forward(ids[:, 7:], width), wanted)


def test_tables_are_small_however_many_tokens_a_draft_has_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is as long as the longest text that a call may reach: one a width would take gigabytes."""
    _, draft = pair("llama")
    widths: list[int] = []

    def listed(slots: Tensor, *args: object) -> Tensor:
        widths.append(slots.shape[1])
        return attention_mask(slots, *args)

    monkeypatch.setattr("hf_specdec.models.masks.attention_mask", listed)
    runner = DynamicRunner(draft, {CACHE_NAME: DynamicCache(), "use_cache": True}, prompts(1)["input_ids"], 2000)
    for width in (11, 3, 1000, 2):
        runner.forward(torch.full((1, width), 5), 1)
    assert widths == [3, 2]


@pytest.mark.parametrize("window", [None, 40])
def test_wide_masks_are_not_kept(window: int | None) -> None:
    table = CausalMasks(2000, window, torch.float32, torch.device("cpu"))
    for width in (40, 100, 3):
        slots, visible = torch.arange(300 - width, 300).unsqueeze(0), torch.ones(1, 300, dtype=torch.bool)
        wanted = attention_mask(slots, visible, window, torch.float32)
        assert torch.equal(table.of_last(width, 300), wanted)
    assert set(table._tables) == {3}


@pytest.mark.parametrize("capacity", [59, 60, 64])
def test_masks_of_accelerators_begin_where_memory_efficient_attention_can_load_them(capacity: int) -> None:
    """`meta` stands in for CUDA."""
    tables = [CausalMasks(capacity, None, torch.float32, torch.device(name)) for name in ("meta", "cpu")]
    offsets = set()
    for slots in range(6, capacity + 1):
        aligned, view = (table.of_last(5, slots) for table in tables)
        assert aligned.shape == view.shape and aligned.storage_offset() % 8 == 0
        offsets.add(view.storage_offset() % 8)
    assert len(offsets) == 8, "unaligned without the copy"


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("span", [9, 12])
def test_cuts_of_a_line_are_the_masks_of_their_slots(window: int | None, span: int) -> None:
    slots = torch.tensor([[4, 5, 6], [2, 3, 4], [6, 7, 8]])
    visible = torch.ones(3, span, dtype=torch.bool)
    table = SlotMasks(12, window, torch.float32, slots.device)
    assert torch.equal(table.of(slots, span, None), attention_mask(slots, visible, window, torch.float32))
    visible[1, :2] = False
    assert torch.equal(table.of(slots, span, visible), attention_mask(slots, visible, window, torch.float32))


@pytest.mark.parametrize("padded", [True, False])
def test_a_batch_s_prompt_is_masked_by_the_model_itself(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready masks cover a round's few tokens; over a long prompt of many rows they would not fit into memory."""
    target, draft = pair("llama")
    target.set_attn_implementation("sdpa")
    widths: list[int] = []

    def listed(self: SlotMasks, slots: Tensor, *args: object) -> Tensor:
        widths.append(slots.shape[1])
        return of(self, slots, *args)

    of = SlotMasks.of
    monkeypatch.setattr(SlotMasks, "of", listed)
    inputs = prompts(4, length=40)
    if not padded:
        inputs = {"input_ids": inputs["input_ids"].clamp(min=3)}
    same_as_plain(target, draft, inputs, {"max_new_tokens": 12, "do_sample": False}, num_assistant_tokens=4)
    # The rejected drafts' places are read anew: a pass covers γ + 1 tokens, or what a draft has to catch up with.
    assert widths and max(widths) <= 6
