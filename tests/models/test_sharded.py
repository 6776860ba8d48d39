"""Models whose weights are split among processes are refused by name."""

from __future__ import annotations

import pytest
import torch
from helpers.families import pair, prompts

import hf_specdec
from hf_specdec import checks

CALL = {"max_new_tokens": 4, "do_sample": False, "generation_strategy": "speculative"}


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports a group of two processes."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *group: 2)


@pytest.mark.parametrize(
    ("sharding", "name"), [("is_deepspeed_zero3_enabled", "ZeRO-3"), ("is_fsdp_managed_module", "FSDP")]
)
def test_sharded_models_are_refused(two_processes, sharding: str, name: str, monkeypatch) -> None:
    target, draft = pair("llama")
    expected = target.generate(**prompts(1), max_new_tokens=4, do_sample=False)
    with hf_specdec.enable(target, assistant_model=draft):
        # Processes that hold all the weights decode on their own.
        assert torch.equal(target.generate(**prompts(1), **CALL), expected)
        monkeypatch.setattr(checks, sharding, lambda *model: True)
        with pytest.raises(ValueError, match=f"model=LlamaForCausalLM is sharded by .*{name}"):
            target.generate(**prompts(1), **CALL)


def test_a_part_that_is_sharded_is_found(two_processes) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    target, draft = pair("llama")
    mlp = draft.model.layers[0].mlp
    mlp.__class__ = type("Sharded", (type(mlp), fsdp.FSDPModule), {"__new__": object.__new__})
    with (
        hf_specdec.enable(target, assistant_model=draft),
        pytest.raises(ValueError, match="assistant_model=LlamaForCausalLM is sharded by FSDP"),
    ):
        target.generate(**prompts(1), **CALL)


def test_synced_gpus_is_refused() -> None:
    target, draft = pair("llama")
    with hf_specdec.enable(target, assistant_model=draft), pytest.raises(ValueError, match="synced_gpus=True"):
        target.generate(**prompts(1), **CALL, synced_gpus=True)
