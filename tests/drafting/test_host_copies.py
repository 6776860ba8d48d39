"""How often drafting waits for its device: once a round, unless stop rules or processors need values on the host."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.families import pair, prompts
from helpers.pairwise import pairwise
from torch.overrides import TorchFunctionMode

import hf_specdec
from hf_specdec.drafting import drafter_choice
from hf_specdec.drafting.model_drafter import ModelDrafter

SETTINGS = {"max_new_tokens": 20, "do_sample": False, "num_assistant_tokens": 4, "generation_strategy": "speculative"}


class Waits(TorchFunctionMode):
    """Counts, while drafting, what would wait for an accelerator: values read on the host, numbers made on the device.

    Operations whose result's shape depends on values count too.
    """

    drafting = False
    count = 0
    READS = frozenset({"tolist", "item", "numpy", "nonzero", "unique", "equal", "allclose", "masked_select"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        read = name in self.READS or name in ("__bool__", "__int__", "__float__", "__index__")
        # `models.traits.on_device` makes numbers on the CPU and sends them without waiting.
        made = func is torch.tensor and (kwargs or {}).get("device") != "cpu"
        masked = name in ("__getitem__", "__setitem__") and getattr(args[1], "dtype", None) is torch.bool
        self.count += self.drafting and (read or made or masked)
        return func(*args, **(kwargs or {}))


def waits_per_draft(call: dict[str, Any], family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """How often drafts wait, except the first, which reads the prompt; what the model itself does is left out."""
    target, draft = pair(family)
    waits, counts = Waits(), list[int]()
    drafts = ModelDrafter._draft

    def counted(self: ModelDrafter, *args: Any) -> Any:
        waits.drafting, waits.count = True, 0
        proposal = drafts(self, *args)
        waits.drafting = False
        counts.append(waits.count)
        return proposal

    draft.register_forward_pre_hook(lambda *args: setattr(waits, "drafting", False))
    draft.register_forward_hook(lambda *args: setattr(waits, "drafting", True))
    with monkeypatch.context() as patch:
        patch.setattr(ModelDrafter, "_draft", counted)
        torch.manual_seed(3)
        with hf_specdec.enable(target, assistant_model=draft), waits:
            target.generate(**prompts(rows), **{**SETTINGS, "eos_token_id": None, **call})
    assert len(counts) > 2, "hardly anything was drafted"
    return set(counts[1:])


@pytest.fixture
def as_on_an_accelerator(monkeypatch) -> Iterator[None]:
    chosen = drafter_choice._steps_per_sync
    monkeypatch.setattr(drafter_choice, "_steps_per_sync", lambda device, *rest: chosen(torch.device("cuda"), *rest))
    yield


@pytest.mark.parametrize(
    ("sampled", "rows", "family"),
    pairwise(({}, {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9}), (1, 3), ("llama", "t5")),
)
def test_a_draft_of_fixed_length_waits_once(
    family: str, rows: int, sampled: dict[str, Any], monkeypatch, as_on_an_accelerator: None
) -> None:
    for lookahead in (1, 8):
        assert waits_per_draft({"num_assistant_tokens": lookahead, **sampled}, family, rows, monkeypatch) == {1}


@pytest.mark.parametrize(
    ("call", "most"), [({"entropy_threshold": 0.1}, 2), ({"repetition_penalty": 1.2}, 8), ({"eta_cutoff": 0.01}, 9)]
)
def test_a_draft_that_may_stop_at_any_step_waits_more_often(
    call: dict[str, Any], most: int, monkeypatch, as_on_an_accelerator: None
) -> None:
    """Every four steps for stop rules, and at every step for processors that read the text or check on the host."""
    # Eta sampling's check, which torch's compiler turns off for good in a process that has used it.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    call = {"num_assistant_tokens": 8, "do_sample": "eta_cutoff" in call, **call}
    assert max(waits_per_draft(call, "llama", 1, monkeypatch)) >= most


def test_on_a_cpu_every_step_is_looked_at(monkeypatch) -> None:
    assert max(waits_per_draft({"num_assistant_tokens": 8}, "llama", 1, monkeypatch)) == 8
