"""Recurrences of transformers' models, token by token: the state after each of a pass's last tokens is kept.

A recurrent layer remembers its text in one state of fixed size, which cannot be cut back to an earlier token. But a
copy can be kept for every token that may be rejected. transformers' modules call a recurrence by a function of their
namespace: one for a single token, one for many. During our passes, the second is replaced: it runs over the tokens that
are certain to stay, and the first over each of the others. Projections and attention still see all tokens at once, and
the recurrence computes exactly what plain `generate` computes: the prompt in one call, then token by token.
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
        axes: the token axis of each argument of `many` that has one.
        output: the token axis of the output of `many`.
        state: the argument of `many` for the initial state; None if it always starts from zero.
        step: runs one token by `single`, with the arguments of `many` cut to it, without changing the given state.
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
    """Call `single` as `Mamba2Mixer.forward` does: per-head numbers are expanded to the widths of head and state."""
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
    """Records the states of a pass's recurrences.

    Args:
        before: the state of each recurrent layer before the pass, in the layers' order; empty before the first pass.
        last: the number of last tokens after each of which a state is kept, in addition to the one before them.

    Attributes:
        states: for each layer that ran, the kept states in order.
    """

    def __init__(self, before: Sequence[Tensor], last: int) -> None:
        self.before, self.last = before, last
        self.states: list[list[Tensor]] = []

    def run(self, kind: Recurrence, many: Callable[..., Any], single: Callable[..., Any], given: Arguments) -> Any:
        """Return what `many` would return for the arguments `given`."""
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
# The replacements in modules while some pass records: the original function, the replacement, and its users.
_replaced: dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., Any], int]] = {}


def places(model: Module) -> Places:
    """A model's known recurrences, with the modules that call them."""
    names = {type(part).__module__ for part in model.modules()}
    return [
        (module, kind)
        for module in (sys.modules[name] for name in sorted(names) if name in sys.modules)
        for kind in RECURRENCES
        if callable(getattr(module, kind.many, None)) and callable(getattr(module, kind.single, None))
    ]


@contextmanager
def recording(recorder: Recorder, where: Places) -> Iterator[None]:
    """Run the recurrences of passes in this context through a recorder.

    The functions are replaced until the last recording pass has ended; for passes of other threads they do what they
    always do.
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
