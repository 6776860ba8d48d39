"""What tests put in place of the package's own functions, and notes of how these are called."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from hf_specdec.drafting import drafter_choice
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.other_device import OtherDeviceDrafter
from hf_specdec.lengths import chances
from hf_specdec.lengths.auto_length import AutoLength
from hf_specdec.lengths.history import LengthHistory
from hf_specdec.prepared import compiled_step
from hf_specdec.prepared.repeated_blocks import Segment


def noted(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, what: Callable[..., Any] = lambda *args, **named: args
) -> list[Any]:
    """Fills up, for the rest of a test, with what the calls of a function are given, before each of them goes on."""
    seen: list[Any] = []
    original = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        seen.append(what(*args, **named))
        return original(*args, **named)

    monkeypatch.setattr(owner, name, call)
    return seen


def returned(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, what: Callable[..., Any] = lambda made, *args, **named: made
) -> list[Any]:
    """The same with what the calls return."""
    seen: list[Any] = []
    original = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        made = original(*args, **named)
        seen.append(what(made, *args, **named))
        return made

    monkeypatch.setattr(owner, name, call)
    return seen


def choose_in_turn(monkeypatch, *lengths: int, first: int = 1) -> None:
    """What "auto" chooses after its first round, again and again; so that both kinds of rounds draft alike."""
    monkeypatch.setattr(AutoLength, "_begin", lambda self: setattr(self, "limit", first))
    turns: dict[AutoLength, Iterator[int]] = {}

    def choose(self: AutoLength) -> None:
        self.limit = next(turns.setdefault(self, cycle(lengths)))

    monkeypatch.setattr(AutoLength, "_choose", choose)


def copy_wherever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every copied token seem worth verifying, and the model seem to be wrong until it was right.

    Look-ups never rest: whether they do depends on how long they take.
    """
    monkeypatch.setattr(LengthHistory, "seconds", lambda self, copied, steps: 1.0)
    monkeypatch.setattr(LengthHistory, "pay_look_up", lambda self, saved: None)
    monkeypatch.setattr(chances, "PRIOR_ACCEPTANCE", 0.1)


def drafting_apart(monkeypatch: pytest.MonkeyPatch) -> list[DraftProposal]:
    """Drafts count as being on another device; what they propose is added to the returned list."""
    monkeypatch.setattr(drafter_choice, "is_on_other_device", lambda draft, target, processors: processors.portable)
    return returned(monkeypatch, OtherDeviceDrafter, "propose")


def interpret_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled rounds without a compiler: what inductor would compile runs operation by operation."""
    monkeypatch.setattr(compiled_step, "compile_refusal", lambda device: None)
    monkeypatch.setattr(compiled_step, "_codes", OrderedDict())
    monkeypatch.setattr(compiled_step, "supported", lambda: False)
    monkeypatch.setattr(compiled_step, "_compile", _interpreted)


def _interpreted(segment: Segment, device: torch.device) -> Callable[[list[Any]], Any]:
    """In place of inductor's code."""
    module = GraphModule({}, segment.graph)

    def code(inputs: list[Any]) -> Any:
        found = module(*inputs)
        inputs.clear()
        return found

    return code
