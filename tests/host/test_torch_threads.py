"""Calls use fewer threads while processors are lacking, and leave torch's number as it was."""

import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.identity import speculated
from helpers.models import llama, noisy, prompts

import hf_specdec
from hf_specdec.host import torch_threads
from hf_specdec.host.torch_threads import MOST_PATIENCE, PATIENCE, ThreadCount, all_threads, seconds_waited

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}


def after(count: ThreadCount, *lacking: float, seconds: float = 0.1) -> int:
    """The threads in use after windows that lacked so many processors."""
    for processors in lacking:
        count.observe(seconds, processors * seconds)
    return count.used


def test_as_many_threads_go_as_lack_a_processor_but_one_stays() -> None:
    assert after(ThreadCount(16), 3.2) == 13 and after(ThreadCount(2), 0.7) == 1
    assert after(ThreadCount(2), 5.0, 5.0) == 1
    assert after(ThreadCount(2), *[0.2] * 100) == 2, "what little waiting there is on any machine"


def test_threads_come_back_one_by_one_after_patience() -> None:
    count = ThreadCount(3)
    after(count, 2.0)
    calm = round(PATIENCE / 0.1)
    assert [after(count, *[0.0] * (calm - 1)), after(count, 0.0), after(count, *[0.0] * calm)] == [1, 2, 3]
    assert after(count, *[0.0] * 1000) == 3, "never more than the user's"


def test_a_thread_that_lacks_again_is_tried_less_and_less_often() -> None:
    """One other process on two processors: one thread never waits, two always do."""
    count, tries = ThreadCount(2), []
    for window in range(2000):
        tries += [window] if count.used == 2 else []
        after(count, 0.7 if count.used == 2 else 0.0)
    pauses = [(later - earlier) * 0.1 for earlier, later in pairwise(tries)]
    assert pauses == sorted(pauses) and max(pauses) == pytest.approx(MOST_PATIENCE, rel=0.1)
    assert len(tries) < 20


class Waits:
    """Stands in for `seconds_waited`: two processors lack as soon as more than one thread is used."""

    def __init__(self, lacking: float) -> None:
        self.lacking, self.waited, self.used = lacking, 0.0, []

    def __call__(self) -> float:
        self.used.append(torch.get_num_threads())
        self.waited += 1e3 * self.lacking * (torch.get_num_threads() > 1)
        return self.waited


@pytest.fixture
def three_threads(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(torch_threads, "WINDOW", 0.0)
    monkeypatch.setattr(torch_threads, "PATIENCE", 1e9)  # however slow the machine is, no thread is tried again
    monkeypatch.setattr(torch_threads, "_count", ThreadCount(1))
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("lacking", [0.0, 2.0])
def test_a_call_gives_threads_up_and_leaves_the_users_number(lacking: float, three_threads: None, monkeypatch) -> None:
    """Control: nothing changes where no processor lacks."""
    target = llama()
    expected = target.generate(**prompts(2), **GREEDY)
    monkeypatch.setattr(torch_threads, "seconds_waited", waits := Waits(lacking))
    assert torch.equal(speculated(target, noisy(target), **prompts(2), **GREEDY), expected)
    assert set(waits.used) == ({3, 1} if lacking else {3}) and torch.get_num_threads() == 3


def test_an_interrupted_call_leaves_the_users_number(three_threads: None, monkeypatch) -> None:
    target = llama()
    monkeypatch.setattr(torch_threads, "seconds_waited", Waits(2.0))

    def interrupt(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if torch.get_num_threads() == 1:
            raise KeyboardInterrupt
        return scores

    call = {**prompts(1), **GREEDY, "logits_processor": [interrupt]}
    with pytest.raises(KeyboardInterrupt):
        speculated(target, noisy(target), **call)
    assert torch.get_num_threads() == 3


def test_code_is_compiled_for_the_users_number(three_threads: None, monkeypatch) -> None:
    """Also after a call; and a number that the user changes between calls is the user's."""
    monkeypatch.setattr(torch_threads, "seconds_waited", Waits(2.0))
    with torch_threads.fitting_threads(torch.device("cpu")) as fit:
        fit()
        assert torch.get_num_threads() == 1
        with all_threads():
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
    with all_threads():
        assert torch.get_num_threads() == 3
    torch.set_num_threads(2)
    with torch_threads.fitting_threads(torch.device("cpu")):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2


@pytest.mark.compiles
def test_compiling_while_threads_are_given_up(three_threads: None, monkeypatch) -> None:
    target = llama()
    expected = target.generate(**prompts(1), **GREEDY)
    monkeypatch.setattr(torch_threads, "seconds_waited", waits := Waits(2.0))
    with (
        hf_specdec.enable(target, assistant_model=noisy(target), generation_strategy="speculative"),
        warnings.catch_warnings(),
    ):
        target.generate(**prompts(1), **GREEDY)
        waits.used.clear()
        warnings.simplefilter("error", UserWarning)  # of what is not compiled, and why
        assert torch.equal(target.generate(**prompts(1), **GREEDY, compile=True), expected)
    assert waits.used[1] == 1, "compiled in the first round, with the number that the first call ended with"


def test_where_waiting_is_not_known_nothing_changes(three_threads: None, monkeypatch) -> None:
    monkeypatch.setattr(torch_threads, "_THREADS", "/proc/no such folder")
    assert seconds_waited() is None
    with torch_threads.fitting_threads(torch.device("cpu")) as fit:
        fit()
        assert torch.get_num_threads() == 3
