"""How often drafting waits for its device: once per few steps where only scores are processed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.families import pair, prompts
from torch.overrides import TorchFunctionMode

import hf_specdec
from hf_specdec.drafting.model_drafter import ModelDrafter

SETTINGS = {"max_new_tokens": 20, "do_sample": False, "num_assistant_tokens": 4, "generation_strategy": "speculative"}


class Copies(TorchFunctionMode):
    """Counts tensors read on the host."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in ("tolist", "item", "__bool__", "__int__")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "stops", [{}, {"entropy_threshold": 0.5}, {"generation_strategy": "bild", "rollback_threshold": 0.0}]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_are_the_same_with_fewer_copies(stops: dict[str, Any], rows: int, monkeypatch) -> None:
    target, draft = pair("llama")
    call = {**prompts(rows), **SETTINGS, "return_dict_in_generate": True, **stops}
    found = {}
    for steps in (1, 4):

        def with_steps(self: ModelDrafter, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **{**kwargs, "steps_per_sync": steps})  # noqa: B023

        made = ModelDrafter.__init__
        with monkeypatch.context() as patch:
            patch.setattr(ModelDrafter, "__init__", with_steps)
            with hf_specdec.enable(target, assistant_model=draft), Copies() as copies:
                output = target.generate(**call)
        found[steps] = output, copies.count
    (often, most), (seldom, fewer) = found[1], found[4]
    assert torch.equal(often.sequences, seldom.sequences)
    for name in ("drafted", "accepted", "new_tokens"):
        assert [getattr(r, name) for r in often.speculation.rounds] == [
            getattr(r, name) for r in seldom.speculation.rounds
        ]
    assert fewer < most or stops
    rounds = len(seldom.speculation.rounds)
    assert most - fewer >= (rounds if not stops else 0)
