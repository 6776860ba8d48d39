"""Wherever Ctrl-C comes while a mode of torch begins or ends, it surfaces as itself, and torch's state is as before."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from helpers.families import pair, prompts
from torch.overrides import TorchFunctionMode

import hf_specdec
from hf_specdec import generation, plugin
from hf_specdec.compat.torch_private import (
    DISPATCH_MODES,
    FUNCTION_MODES,
    dispatch_flags,
    optimizes_graphs,
    set_dispatch_flags,
)
from hf_specdec.host.torch_state import FunctionMode, KeptTorchState
from hf_specdec.models.onednn_linears import OneDnnLinears

# Where modes of torch and of this package begin and end, and where torch takes one off for a moment.
FILES = ("torch/overrides.py", "torch/utils/_python_dispatch.py", "torch/autograd/grad_mode.py", "/contextlib.py")
FUNCTIONS = ("__enter__", "__exit__", "_push_mode", "_pop_mode", "_pop_mode_temporarily")
SETTINGS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SPECULATION = {"generation_strategy": "speculative", "num_assistant_tokens": 2}


class Passing(TorchFunctionMode):
    """A mode of the caller's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Interrupt:
    """Raises `KeyboardInterrupt` before an instruction, of those above, that it has not interrupted yet."""

    def __init__(self) -> None:
        self.seen: set[tuple[CodeType, int]] = set()
        self.came = True

    @contextmanager
    def once(self) -> Iterator[None]:
        """Interrupt this block once; `came` says whether there was an instruction left."""
        before, self.came = sys.gettrace(), False
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        ours = code in (FunctionMode.__enter__.__code__, FunctionMode.__exit__.__code__)
        if ours or (code.co_name in FUNCTIONS and code.co_filename.replace("\\", "/").endswith(FILES)):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return self._instruction
        return None

    def _instruction(self, frame: FrameType, event: str, arg: Any) -> Any:
        place = frame.f_code, frame.f_lasti
        if event == "opcode" and not self.came and place not in self.seen:
            self.seen.add(place)
            self.came = True
            raise KeyboardInterrupt
        return self._instruction


def state() -> dict[str, Any]:
    """What torch has on in this thread, and which models run in it."""
    return {
        "function modes": FUNCTION_MODES.modes(),
        "dispatch modes": DISPATCH_MODES.modes(),
        **dispatch_flags(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "optimizes": optimizes_graphs(),
        "running": plugin._running.get(),
    }


def faults(mode: Any, most: int = sys.maxsize) -> tuple[list[str], int]:
    """What is wrong after calls that were interrupted, each in another place, and how many of them there were.

    Args:
        mode: the caller's, in which all calls take place.
        most: faults, after which no further calls are made.
    """
    target, draft = pair("llama")
    wrong: list[str] = []
    interrupt = Interrupt()
    with mode, hf_specdec.enable(target, assistant_model=draft):
        before, expected = state(), target.generate(**prompts(1), **SETTINGS)
        while interrupt.came and len(wrong) < most:
            outcome = _outcome(interrupt, lambda: target.generate(**prompts(1), **SETTINGS, **SPECULATION))
            after = state()
            if outcome != ("KeyboardInterrupt" if interrupt.came else "none"):
                wrong.append(outcome)
            wrong.extend(f"{name}: {value}" for name, value in after.items() if value != before[name])
        if not wrong:
            assert torch.equal(target.generate(**prompts(1), **SETTINGS, **SPECULATION), expected)
    return wrong, len(interrupt.seen)


def _outcome(interrupt: Interrupt, call: Any) -> str:
    """What a call raises; nothing of it is kept."""
    try:
        with interrupt.once():
            call()
    except BaseException as error:
        return type(error).__name__
    return "none"


@pytest.fixture(autouse=True)
def passes_in_a_mode(monkeypatch) -> None:
    """Which a larger model's are."""
    monkeypatch.setattr(generation, "onednn_linears", lambda model: OneDnnLinears)


@pytest.mark.parametrize("mode", [nullcontext, Passing])
def test_an_interrupt_surfaces_as_itself_and_leaves_torch_as_it_was(mode: Any) -> None:
    wrong, places = faults(mode())
    assert not wrong and places > 100


def _in_a_thread(mode: Any) -> list[str]:
    """The first fault, in a thread of its own, whose state nothing else sees."""
    flags, found = dispatch_flags(), []
    thread = threading.Thread(target=lambda: found.extend(faults(mode, most=1)[0]))
    thread.start()
    thread.join()
    set_dispatch_flags(flags)
    return found


def test_control_without_the_guard_around_the_call_modes_stay(monkeypatch) -> None:
    monkeypatch.setattr(KeptTorchState, "__exit__", lambda *_: None)
    assert _in_a_thread(nullcontext())


def test_control_torchs_own_function_modes_raise_another_error(monkeypatch) -> None:
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(FunctionMode, name, getattr(TorchFunctionMode, name))
    assert _in_a_thread(nullcontext()) == ["RuntimeError"]
