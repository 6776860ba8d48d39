"""A draft on another device, simulated on the CPU: the output, and which tensors are transferred."""

from typing import Any

import pytest
import torch
from helpers.families import pair, prompts
from helpers.identity import same_as_plain
from helpers.models import llama, noisy, resized
from helpers.patches import drafting_apart
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation import logits_process as host

from hf_specdec import SpeculativeDecoding
from hf_specdec.drafting import other_device
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.drafting.other_device import OtherDeviceDrafter, is_on_other_device
from hf_specdec.host.processors import HostProcessors

GREEDY = {"max_new_tokens": 24, "do_sample": False}
LOSSLESS_BILD = {"generation_strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.1}


@pytest.fixture
def proposals(monkeypatch) -> list[DraftProposal]:
    return drafting_apart(monkeypatch)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("drafter", ["model", "hybrid"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_greedy_tokens_are_those_of_plain_generate(family: str, drafter: str, rows: int, proposals) -> None:
    target, draft = pair(family)
    for variant in ({}, LOSSLESS_BILD):
        same_as_plain(target, draft, prompts(rows), GREEDY, drafter=drafter, **variant)
    assert proposals


@pytest.mark.parametrize("sizes", [(72, 64), (64, 72)])
def test_a_draft_of_another_vocabulary_drafts_apart(sizes: tuple[int, int], proposals) -> None:
    target, draft = (resized(model, size) for model, size in zip((llama(), noisy(llama())), sizes, strict=True))
    same_as_plain(target, draft, prompts(1), {**GREEDY, "eos_token_id": None}, num_assistant_tokens=2)
    assert proposals


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
def test_tokens_travel_and_distributions_once_where_they_are_needed(case: str, proposals, monkeypatch) -> None:
    """Drafting touches nothing that lives with the target; what is transferred goes through `sent`."""
    target, draft = pair("llama", noise=0.03)
    moved: list[Tensor] = []
    with_target = list(target.parameters())

    def sent(tensor: Tensor, device: torch.device) -> Tensor:
        moved.append(tensor)
        return tensor.clone()

    draft_of = ModelDrafter._draft

    def untouched(self: ModelDrafter, *args: Any) -> DraftProposal:
        delivered = [t for p in proposals for t in (p.tokens, p.probs) if t is not None]
        with HandsOff([*with_target, *delivered]):
            return draft_of(self, *args)

    propose = OtherDeviceDrafter.propose

    def remember(self: OtherDeviceDrafter, ids: Tensor, *args: Any) -> DraftProposal:
        with_target.append(ids)
        return propose(self, ids, *args)

    monkeypatch.setattr(other_device, "sent", sent)
    monkeypatch.setattr(OtherDeviceDrafter, "propose", remember)
    monkeypatch.setattr(ModelDrafter, "_draft", untouched)
    settings, call = MOVES[case]
    torch.manual_seed(0)
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=4, **settings)
    target.generate(**prompts(1), **{**GREEDY, **call}, eos_token_id=None, custom_generate=decoding)
    floating = [tensor for tensor in moved if tensor.is_floating_point()]
    tokens = [tensor for tensor in moved if not tensor.is_floating_point()]
    drafted = [proposal for proposal in proposals if proposal.lengths[0]]
    assert len(floating) == (len(drafted) if case.startswith("sampling") else 0)
    assert all(tensor.shape[1] <= 4 for tensor in floating)
    # The prompt first; then a round's drafts one way, and what is new to the draft the other.
    assert all(tensor.shape[1] <= 5 for tensor in tokens[1:]) and len(tokens) <= 2 * len(proposals)


def test_control_touching_what_lives_with_the_target_is_noticed() -> None:
    text = torch.zeros(1, 4)
    with pytest.raises(AssertionError), HandsOff([text]):
        text[:, 2:].sum()


def test_where_a_draft_lives_apart() -> None:
    cpu, gpu, other = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
    bare = HostProcessors(LogitsProcessorList())
    assert (
        is_on_other_device(cpu, gpu, bare)
        and is_on_other_device(gpu, cpu, bare)
        and is_on_other_device(other, gpu, bare)
    )
    assert not is_on_other_device(cpu, cpu, bare) and not is_on_other_device(gpu, gpu, bare)
    apart = [host.TemperatureLogitsWarper(0.5), host.TopKLogitsWarper(5), host.TopPLogitsWarper(0.9)]
    together = [
        RepetitionPenaltyLogitsProcessor(1.1),
        host.EtaLogitsWarper(0.1),  # holds a tensor on the target's device
        host.SuppressTokensLogitsProcessor([3]),
    ]
    assert is_on_other_device(cpu, gpu, HostProcessors(LogitsProcessorList(apart)))
    for processor in together:
        assert not is_on_other_device(cpu, gpu, HostProcessors(LogitsProcessorList([*apart, processor])))
