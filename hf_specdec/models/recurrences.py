"""Recurrences of transformers' models, token by token: the state after each of a pass's last tokens is kept.

A recurrent layer remembers its text in one state of fixed size, which can't be cut back to an earlier token. But it
can be kept for every token that may be rejected. The modules of transformers call a recurrence as a function of their
namespace: one for a single token, one for many. Here the second is replaced, during our passes only, by itself over
the tokens that stay and by the first over each of the others. Projections and attention still see all tokens at once,
and the recurrence computes exactly what plain `generate` computes: the prompt in one call, then token by token.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

Arguments = dict[str, Any]
OneStep = Callable[[Callable[..., Any], Arguments, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Recurrence:
    """A kind of recurrence.

    Args:
        many, single: the names of its functions over many tokens and over one.
        axes: the arguments of `many` that have an axis of tokens, and which.
        output: the axis of tokens of what `many` returns beside the state.
        state: the argument of `many` that takes a state; None: it always starts anew.
        step: one token by `single`, with the arguments of `many` cut to it; leaves the given state as it is.
    """

    many: str
    single: str
    axes: dict[str, int]
    output: int
    state: str | None
    step: OneStep


def _delta_step(single: Callable[..., Any], given: Arguments, state: Tensor) -> tuple[Tensor, Tensor]:
    given = {key: value for key, value in given.items() if key != "chunk_size"}
    output, after = single(**{**given, "initial_state": state})
    return output, after


def _scan2_step(single: Callable[..., Any], given: Arguments, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `Mamba2Mixer.forward` calls it: heads' own numbers are spread over the widths of head and state."""
    after, width = state.clone(), state.shape[-2:]
    x, b, c = (given[key][:, 0] for key in ("hidden_states", "B", "C"))
    output = single(
        after,
        x,
        given["dt"][:, 0, :, None].expand(-1, -1, width[0]),
        given["A"][:, None, None].expand(-1, *width),
        b,
        c,
        given["D"][:, None].expand(-1, width[0]),
        z=None,
        dt_bias=given["dt_bias"][:, None].expand(-1, width[0]),
        dt_softplus=True,
    )
    return output.unsqueeze(1), after


def _scan1_step(single: Callable[..., Any], given: Arguments, state: Tensor) -> tuple[Tensor, Tensor]:
    after = state.clone()
    x, dt, b, c, z = (given[key][..., 0] for key in ("hidden_states", "dt", "B", "C", "z"))
    output = single(after, x, dt, given["A"], b, c, given["D"], z=z, dt_bias=given["delta_bias"], dt_softplus=True)
    return output.unsqueeze(-1), after


RECURRENCES = (
    # Qwen3-Next, Qwen3.5, OLMo hybrid
    Recurrence(
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        dict.fromkeys(("query", "key", "value", "g", "beta"), 1),
        1,
        "initial_state",
        _delta_step,
    ),
    # Mamba 2, Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba 2
    Recurrence(
        "mamba2_chunk_scan",
        "mamba2_selective_state_update",
        dict.fromkeys(("hidden_states", "dt", "B", "C"), 1),
        1,
        "initial_states",
        _scan2_step,
    ),
    # Mamba, Falcon Mamba, Jamba
    Recurrence(
        "mamba_selective_scan",
        "mamba_selective_state_update",
        dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2),
        2,
        None,
        _scan1_step,
    ),
)


class Recorder:
    """The states that a pass's recurrences leave.

    Args:
        before: the state of each recurrent layer before the pass, in the layers' order; empty before the first pass.
        last: how many of the pass's last tokens get a state each, beside the one before them.

    Attributes:
        states: for each layer that ran, the states after the first of its tokens that has one, …, after the last.
    """

    def __init__(self, before: Sequence[Tensor], last: int) -> None:
        self.before, self.last = before, last
        self.states: list[list[Tensor]] = []

    def run(self, kind: Recurrence, many: Callable[..., Any], single: Callable[..., Any], given: Arguments) -> Any:
        """What `many` would return for the arguments `given`."""
        state = self.before[len(self.states)] if self.before else None
        first, axis = next(iter(kind.axes.items()))
        width = given[first].shape[axis]
        head = width - self.last
        if state is not None and (head <= 1 or kind.state is None):
            head = 0
        outputs, states = [], []
        if head:
            output, state = many(**cut(kind, given, 0, head))
            outputs.append(output)
            states.append(state)
        for at in range(head, width):
            assert state is not None, "`last` leaves a first pass at least one token"
            output, state = kind.step(single, cut(kind, given, at, 1), state)
            outputs.append(output)
            states.append(state)
        self.states.append(states)
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=kind.output)), state


def cut(kind: Recurrence, given: Arguments, start: int, length: int) -> Arguments:
    """The arguments of a recurrence for `length` of its tokens."""
    part = {key: given[key].narrow(axis, start, length) for key, axis in kind.axes.items() if given[key] is not None}
    return {**given, **part}


_recorder: ContextVar[Recorder | None] = ContextVar("hf_specdec_recorder", default=None)


Places = Sequence[tuple[ModuleType, Recurrence]]

_lock = Lock()
# What stands in a module's namespace while some pass records: the function that it replaced, itself, and its users.
_replaced: dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., Any], int]] = {}


def places(model: Module) -> Places:
    """The recurrences of a model that are known here, with the modules that call them."""
    names = {type(part).__module__ for part in model.modules()}
    return [
        (module, kind)
        for module in (sys.modules[name] for name in sorted(names) if name in sys.modules)
        for kind in RECURRENCES
        if callable(getattr(module, kind.many, None)) and callable(getattr(module, kind.single, None))
    ]


@contextmanager
def recording(recorder: Recorder, where: Places) -> Iterator[None]:
    """Have the recurrences of passes in this context run through a recorder.

    The functions are replaced until the last pass that records has ended, and do what they always do for passes of
    other threads.
    """
    before, replaced = _recorder.get(), []
    try:
        _recorder.set(recorder)
        with _lock:
            for module, kind in where:
                _replace(module, kind)
                replaced.append((module, kind))
        yield
    finally:
        _recorder.set(before)
        with _lock:
            for module, kind in replaced:
                _put_back(module, kind)


def _replace(module: ModuleType, kind: Recurrence) -> None:
    key = module.__name__, kind.many
    if key in _replaced:
        many, run, users = _replaced[key]
    else:
        many, users = getattr(module, kind.many), 0
        run = _within_reach(module, kind)
        setattr(module, kind.many, run)
    _replaced[key] = many, run, users + 1


def _put_back(module: ModuleType, kind: Recurrence) -> None:
    key = module.__name__, kind.many
    many, run, users = _replaced.pop(key)
    if users > 1:
        _replaced[key] = many, run, users - 1
    elif getattr(module, kind.many) is run:
        setattr(module, kind.many, many)


def _within_reach(module: ModuleType, kind: Recurrence) -> Callable[..., Any]:
    many = getattr(module, kind.many)
    signature = inspect.signature(many)

    @functools.wraps(many)
    def run(*args: Any, **kwargs: Any) -> Any:
        recorder = _recorder.get()
        if recorder is None:
            return many(*args, **kwargs)
        given = dict(signature.bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        return recorder.run(kind, many, getattr(module, kind.single), given)

    return run
