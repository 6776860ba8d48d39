"""Masks by slot: what a query sees, and that no mask covers all pairs of a prompt's tokens."""

import pytest
import torch
from helpers.families import pair, prompts
from helpers.identity import same_as_plain
from helpers.patches import noted

from hf_specdec.models import static_runner
from hf_specdec.models.masks import attention_mask


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("padded", [True, False])
def test_a_query_sees_itself_and_what_is_visible_before_it_in_its_window(window: int | None, padded: bool) -> None:
    slots, span = torch.tensor([[4, 5, 6], [2, 3, 4], [0, 1, 2]]), 9
    visible = torch.ones(3, span, dtype=torch.bool)
    visible[1:, :2] = not padded
    mask = attention_mask(slots, span, window, torch.float32, visible if padded else None)
    assert mask.shape == (3, 1, 3, span)
    for row, column, key in torch.cartesian_prod(torch.arange(3), torch.arange(3), torch.arange(span)).tolist():
        own = int(slots[row, column])
        seen = bool(visible[row, key]) and 0 <= own - key < (window or span)
        assert mask[row, 0, column, key] == (0 if seen or key == own else torch.finfo(torch.float32).min)


@pytest.mark.parametrize("padded", [True, False])
def test_a_batch_s_prompt_is_masked_by_the_model_itself(padded: bool, monkeypatch) -> None:
    """Masks cover a round's few tokens; over a long prompt of many rows they would not fit into memory."""
    target, draft = pair("llama")
    target.set_attn_implementation("sdpa")
    widths = noted(monkeypatch, static_runner, "slot_masks", lambda slots, *_: slots.shape[1])
    inputs = prompts(4, length=40)
    if not padded:
        inputs = {"input_ids": inputs["input_ids"].clamp(min=3)}
    same_as_plain(target, draft, inputs, {"max_new_tokens": 12, "do_sample": False}, num_assistant_tokens=4)
    # The rejected drafts' places are read anew: a pass covers γ + 1 tokens, or what a draft has to catch up with.
    assert widths and max(widths) <= 6
