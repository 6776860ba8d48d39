"""A draft on another device, simulated on the CPU: which tensors are transferred, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.distant import Log, drafting_ahead
from helpers.families import pair, prompts
from helpers.identity import same_as_plain
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation import logits_process as host

from hf_specdec import SpeculativeDecoding
from hf_specdec.decoding import Decoder
from hf_specdec.drafting import other_device
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.drafting.other_device import OtherDeviceDrafter, can_draft_ahead, is_on_other_device
from hf_specdec.host.processors import HostProcessors

GREEDY = {"max_new_tokens": 24, "do_sample": False}
LOSSLESS_BILD = {"generation_strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.1}


@pytest.fixture
def log(monkeypatch) -> Log:
    return drafting_ahead(monkeypatch)


@pytest.mark.parametrize("drafter", ["model", "hybrid"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_rows_of_a_batch_are_drafted_apart_but_not_ahead(family: str, drafter: str, log) -> None:
    target, draft = pair(family)
    for variant in ({}, LOSSLESS_BILD):
        same_as_plain(target, draft, prompts(4), GREEDY, drafter=drafter, **variant)
    assert log.proposals and not log.kept and not any(log.passes_ahead)


class HandsOff(TorchDispatchMode):
    """Fails where an operation touches one of these tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.forbidden = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.numel():
                assert value.untyped_storage().data_ptr() not in self.forbidden, func
        return func(*args, **(kwargs or {}))


MOVES = {
    "greedy": ({}, {}),
    "greedy, processed": ({}, {"logits_processor": LogitsProcessorList([host.TopKLogitsWarper(5)])}),
    "sampling": ({}, {"do_sample": True, "temperature": 0.7}),
    "sampling, block": ({"verification": "block"}, {"do_sample": True}),
    "bild, sampling": ({"strategy": "bild", "fallback_threshold": 0.1}, {"do_sample": True}),
}


@pytest.mark.parametrize("case", MOVES)
def test_tokens_travel_and_distributions_once_where_they_are_needed(case: str, log, monkeypatch) -> None:
    """Neither drafting nor drafting ahead touches what lives with the target; the rest goes through `sent`."""
    target, draft = pair("llama", noise=0.03)
    moved: list[Tensor] = []
    with_target = list(target.parameters())

    def sent(tensor: Tensor, device: torch.device) -> Tensor:
        moved.append(tensor)
        return tensor.clone()

    def untouched(method: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(self: OtherDeviceDrafter, *args: Any) -> Any:
            delivered = [t for p in log.proposals for t in (p.tokens, p.probs) if t is not None]
            with HandsOff([*with_target, *delivered]):
                return method(self, *args)

        return guarded

    propose = OtherDeviceDrafter.propose

    def remember(self: OtherDeviceDrafter, ids: Tensor, *args: Any) -> DraftProposal:
        with_target.append(ids)
        return propose(self, ids, *args)

    monkeypatch.setattr(other_device, "sent", sent)
    monkeypatch.setattr(OtherDeviceDrafter, "propose", remember)
    monkeypatch.setattr(ModelDrafter, "_draft", untouched(ModelDrafter._draft))
    monkeypatch.setattr(OtherDeviceDrafter, "ahead", untouched(OtherDeviceDrafter.ahead))
    settings, call = MOVES[case]
    torch.manual_seed(0)
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=4, **settings)
    target.generate(**prompts(1), **{**GREEDY, **call}, eos_token_id=None, custom_generate=decoding)
    assert decoding.stats is not None and any(log.passes_ahead)
    floating = [tensor for tensor in moved if tensor.is_floating_point()]
    tokens = [tensor for tensor in moved if not tensor.is_floating_point()]
    drafted = [proposal for proposal in log.proposals if proposal.lengths[0]]
    assert len(floating) == (len(drafted) if case.startswith("sampling") else 0)
    assert all(tensor.shape[1] <= 4 for tensor in floating)
    # The prompt first; then a round's drafts one way, and what is new to the draft the other.
    assert all(tensor.shape[1] <= 5 for tensor in tokens[1:]) and len(tokens) <= 2 * len(log.proposals)


def test_control_touching_what_lives_with_the_target_is_noticed() -> None:
    text = torch.zeros(1, 4)
    with pytest.raises(AssertionError), HandsOff([text]):
        text[:, 2:].sum()


class NoWaiting(TorchFunctionMode):
    """Fails where the host reads from a tensor, or makes one of numbers of its own: on a GPU both wait for it."""

    WAITS = ("tolist", "item", "tensor", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ not in self.WAITS, func.__name__
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting_after_the_pass(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From the end of the target's pass to the call of `ahead` the host must not wait."""
    verify, modes = Decoder._verify, []

    def watched(self: Decoder, *args: Any) -> Any:
        forward = self.target.forward

        def passed(*inputs: Any) -> Tensor:
            logits = forward(*inputs)
            modes.append(NoWaiting())
            modes[-1].__enter__()
            return logits

        self.target.forward = passed  # type: ignore[method-assign]
        try:
            return verify(self, *args)
        finally:
            del self.target.forward  # type: ignore[attr-defined]

    ahead = OtherDeviceDrafter.ahead

    def after(self: OtherDeviceDrafter) -> int:
        modes.pop().__exit__(None, None, None)
        return ahead(self)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "_verify", watched)
        patch.setattr(OtherDeviceDrafter, "ahead", after)
        yield
    assert not modes


@pytest.mark.parametrize("case", MOVES)
def test_the_host_does_not_wait_before_drafting_ahead(case: str, log, monkeypatch) -> None:
    target, draft = pair("llama", noise=0.03)
    settings, call = MOVES[case]
    with no_waiting_after_the_pass(monkeypatch):
        decoding = SpeculativeDecoding(draft, num_assistant_tokens=4, **settings)
        target.generate(**prompts(1), **{**GREEDY, **call}, eos_token_id=None, custom_generate=decoding)
    assert any(log.passes_ahead)


def test_where_a_draft_lives_apart_and_when_it_drafts_ahead() -> None:
    cpu, gpu, other = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
    bare = HostProcessors(LogitsProcessorList())
    assert (
        is_on_other_device(cpu, gpu, bare)
        and is_on_other_device(gpu, cpu, bare)
        and is_on_other_device(other, gpu, bare)
    )
    assert not is_on_other_device(cpu, cpu, bare) and not is_on_other_device(gpu, gpu, bare)
    assert can_draft_ahead(cpu, gpu, 1)
    assert not can_draft_ahead(cpu, gpu, 2) and not can_draft_ahead(cpu, cpu, 1)
    assert not can_draft_ahead(gpu, cpu, 1) and not can_draft_ahead(other, gpu, 1)
    apart = [host.TemperatureLogitsWarper(0.5), host.TopKLogitsWarper(5), host.TopPLogitsWarper(0.9)]
    together = [
        RepetitionPenaltyLogitsProcessor(1.1),
        host.EtaLogitsWarper(0.1),  # holds a tensor on the target's device
        host.SuppressTokensLogitsProcessor([3]),
    ]
    assert is_on_other_device(cpu, gpu, HostProcessors(LogitsProcessorList(apart)))
    for processor in together:
        assert not is_on_other_device(cpu, gpu, HostProcessors(LogitsProcessorList([*apart, processor])))
