"""Cases that random calls once found, kept."""

from __future__ import annotations

import pytest
import torch
from helpers.families import pair

import hf_specdec


@pytest.mark.parametrize("family", ["gpt-j", "gpt-neox", "llama"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_whose_mask_is_all_zeros(family: str, use_cache: bool) -> None:
    """Its last prompt token attends evenly to all keys of its pass, so no draft may be among them."""
    target, draft = pair(family)
    call = {
        "input_ids": torch.tensor([[3], [0]]),
        "attention_mask": torch.tensor([[1], [0]]),
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "use_cache": use_cache,
    }
    expected = target.generate(**call)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        assert torch.equal(target.generate(**call, num_assistant_tokens=1), expected)
