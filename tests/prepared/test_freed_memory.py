"""Freed memory goes back to the system: all of it, after each large prompt."""

import ctypes
import sys

import pytest
import torch
from helpers.families import pair, prompts
from helpers.memory import resident

from hf_specdec.prepared import prepared_rounds
from hf_specdec.prepared.freed_memory import return_freed_memory

BLOCK, BLOCKS, KEPT_EVERY = 2**16, 1024, 64


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs the GNU C library"
)
def test_memory_between_what_is_kept_is_returned() -> None:
    blocks = [torch.ones(BLOCK, dtype=torch.uint8) for _ in range(BLOCKS)]
    full, freed = resident(), BLOCK * (BLOCKS - BLOCKS // KEPT_EVERY)
    kept = blocks[KEPT_EVERY - 1 :: KEPT_EVERY]
    blocks.clear()
    assert resident() > full - freed / 2  # the library keeps it
    return_freed_memory()
    assert resident() < full - 0.9 * freed and all(block.all() for block in kept)


def test_other_systems_keep_it(monkeypatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("asked for a library of Linux"))
    return_freed_memory()


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("drafter", ["model", "none"])
def test_memory_is_returned_after_each_large_prompt(drafter: str, large: bool, fast_rounds, monkeypatch) -> None:
    """The default limit is far above the tiny models' prompts."""
    if large:
        monkeypatch.setattr(prepared_rounds, "LARGE_PROMPT", 0)
    returned = []
    monkeypatch.setattr(prepared_rounds, "return_freed_memory", lambda: returned.append(len(fast_rounds)))
    target, draft = pair("llama")
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    chosen = {"assistant_model": draft} if drafter == "model" else {"drafter": "none"}
    target.generate(**prompts(2), **settings, **chosen, generation_strategy="speculative")
    assert len(fast_rounds) > 1
    if large:
        assert len(returned) == (2 if drafter == "model" else 1) and len({*returned}) == 1
    else:
        assert not returned
