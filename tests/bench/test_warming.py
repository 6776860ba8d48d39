"""Warm-up: it lasts until times have settled, within a limit; calls that prepare something don't count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.made_up_results import method, part_of, plain_call

from hf_specdec.bench.figures import speed
from hf_specdec.bench.inputs.prompts import Prompt, benchmark_prompts
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.records import ColdStart
from hf_specdec.bench.running import warming
from hf_specdec.bench.running.methods import ours, plain
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.models import recorded_passes

PROMPTS = [Prompt(0, "qa", (1, 2, 3))]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Calls take the given times, and prepare something where that is given."""
    state = SimpleNamespace(now=0.0, seconds=iter(()), prepared=iter(()), made=0)

    def called(*args: Any, **place: Any) -> Any:
        state.now += next(state.seconds)
        state.made += next(state.prepared, 0)
        return plain_call()

    monkeypatch.setattr(warming, "MOST_WARM_UPS", 12)
    monkeypatch.setattr(warming, "timed_call", called)
    monkeypatch.setattr(warming, "prepared_so_far", lambda pair: (state.made,))
    monkeypatch.setattr(warming, "time", SimpleNamespace(perf_counter=lambda: state.now))
    return state


def warmed(clock: SimpleNamespace, seconds: Iterator[float], prepared: Sequence[int] = ()) -> ColdStart:
    clock.seconds, clock.prepared = seconds, iter(prepared)
    return warming.warm_up(plain(SimpleNamespace()), PROMPTS, Settings())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "prepared", "calls", "settled"),
    [
        ([9.0, 4.0, 1.0, 1.06, 1.02, 1.0], (), 5, True),  # two in a row have to agree
        ([1.0] * 9, (1, 1, 0, 1, 0), 3, True),  # which does not count while passes are still recorded
        ([1.0] * 9, (1, 1, 1, 1, 0), 5, True),
        ([2.0, 3.0] * 9, (), 12, False),  # the most
        ([300.0, 50.0, 9.0, 2.0, 1.0], (), 4, False),  # the time is over; that of the first does not count
        ([300.0, 70.0], (), 2, False),
    ],
)
def test_warm_up_lasts_until_times_have_settled(
    clock: SimpleNamespace, seconds: list[float], prepared: Sequence[int], calls: int, settled: bool
) -> None:
    cold = warmed(clock, iter(seconds), prepared)
    assert cold.seconds == pytest.approx(seconds[:calls]) and cold.settled == settled
    assert (cold.method, cold.batch, cold.length) == ("plain", 1, 3)


def test_calls_in_which_something_was_prepared_are_made_again(clock: SimpleNamespace) -> None:
    clock.seconds, clock.prepared = iter([1.0] * 9), iter([1, 1, 0])
    assert warming.warm_call(plain(SimpleNamespace()), PROMPTS, Settings()).again == 2  # type: ignore[arg-type]
    clock.prepared = iter([1] * 9)
    call = warming.warm_call(plain(SimpleNamespace()), PROMPTS, Settings())  # type: ignore[arg-type]
    assert call.again == warming.MOST_AGAIN


def test_what_such_calls_took_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is time to prepare, though it came after the warm-up."""
    seconds, made = iter([5.0, 3.0, 1.0]), iter([0, 1, 1, 2, 2, 2])
    monkeypatch.setattr(warming, "timed_call", lambda *args, **place: replace(plain_call(), seconds=next(seconds)))
    monkeypatch.setattr(warming, "prepared_so_far", lambda pair: next(made))
    call = warming.warm_call(plain(SimpleNamespace()), PROMPTS, Settings())  # type: ignore[arg-type]
    assert (call.seconds, call.again, call.preparing) == (1.0, 2, 4.0 + 2.0)
    plain_method = method("plain")
    part = part_of([call], [plain_method], cold=[ColdStart("plain", 1, 3, (9.0, 1.0), True)])
    assert speed.cold_seconds(part, plain_method, 1) == pytest.approx(8.0 + 6.0)


def test_recordings_are_counted(saved_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 1)
    target, draft = map(str, saved_pair)
    settings = Settings(model_name=target, assistant_model=draft, assisted_generation=True, max_new_tokens=12)
    pair = load_pair(settings)
    (prompt,) = benchmark_prompts(pair, (30,), 1, 12)
    before = warming.prepared_so_far(pair)
    warming.warm_up(plain(pair), [prompt], settings)
    assert warming.prepared_so_far(pair) == before, "plain generate() records nothing"
    warming.warm_up(ours("speculative", {"num_assistant_tokens": 2}, pair), [prompt], settings)
    assert sum(warming.prepared_so_far(pair)) > sum(before)


def test_refusals_are_said_in_one_line(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> Any:
        raise ValueError("model: can't\n be done")

    monkeypatch.setattr(warming, "timed_call", refused)
    with pytest.raises(BenchError, match=r"^model: can't be done$"):
        warmed(clock, iter([]))
