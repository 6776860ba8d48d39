"""Turns, in which every place and every neighbour is equally often, and warm-up, until times have settled."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.made_up_results import method, part_of, plain_call
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.bench.figures import speed
from hf_specdec.bench.inputs.prompts import Prompt, benchmark_prompts
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.records import ColdStart
from hf_specdec.bench.running import warming
from hf_specdec.bench.running.measuring import in_turn
from hf_specdec.bench.running.methods import ours, plain
from hf_specdec.bench.running.turns import cycle, turn, turn_number
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.models import recorded_passes

Counts = tuple[int, int, int]
COUNTS = st.tuples(st.integers(1, 12), st.integers(1, 40), st.integers(1, 30))  # items, places, repeats


def unevenness(found: Iterable[object], all_of_them: int) -> int:
    """The greatest difference between how often two of so many occur."""
    counts = Counter(found).values()
    return max(counts, default=0) - (min(counts, default=0) if len(counts) == all_of_them else 0)


def of_places(orders: list[list[int]], count: int) -> int:
    return unevenness(((place, item) for order in orders for place, item in enumerate(order)), count**2)


def of_neighbours(orders: list[list[int]], count: int) -> int:
    return unevenness((pair for order in orders for pair in pairwise(order)), count * (count - 1))


@pytest.mark.parametrize("count", range(1, 14))
def test_each_item_stands_in_each_place_and_behind_each_other_equally_often(count: int) -> None:
    items = list(range(count))
    for start in range(3 * count):
        orders = [turn(items, number) for number in range(start, start + cycle(count))]
        assert all(sorted(order) == items for order in orders)
        assert of_places(orders, count) == of_neighbours(orders, count) == 0
    assert turn(items, 3) == turn(items, 3 + cycle(count))


def test_rotation_does_not_do_that() -> None:
    """The negative control: in a rotation each follows the same other in all turns but one."""
    orders = [[*range(shift, 6), *range(shift)] for shift in range(6)]
    assert of_places(orders, 6) == 0 and of_neighbours(orders, 6) == 5


def test_an_odd_count_needs_twice_as_many_turns() -> None:
    """The negative control of `cycle`."""
    assert all(of_neighbours([turn(range(count), n) for n in range(count)], count) > 0 for count in (3, 5, 7))


@given(COUNTS)
def test_any_number_of_repeats_is_as_even_as_it_can_be(counts: Counts) -> None:
    count, places, repeats = counts
    numbers = [turn_number(repeat, place, places, count) for repeat, place in product(range(repeats), range(places))]
    orders = [turn(range(count), number) for number in numbers]
    assert sorted(numbers) == list(range(places * repeats)) and of_places(orders, count) <= 1
    assert of_neighbours(orders, count) <= 1 + count % 2


@given(COUNTS)
def test_an_example_has_another_order_in_each_repeat(counts: Counts) -> None:
    count, places, _ = counts
    assert same_orders(turn_number, count, places) == 0


def same_orders(number: Callable[[int, int, int, int], int], count: int, places: int) -> int:
    """How many examples have the same order in two of as many repeats as there are orders."""
    numbers = [[number(repeat, place, places, count) for repeat in range(cycle(count))] for place in range(places)]
    return sum(len({of_one % cycle(count) for of_one in of_all}) < cycle(count) for of_all in numbers)


def test_counting_on_or_by_the_prompt_does_not_do_both() -> None:
    """The negative controls: the numbers that were given before."""
    assert same_orders(lambda repeat, place, places, count: repeat * places + place, 4, 8) == 8
    by_batch = [turn(range(4), repeat + 4 * place) for repeat, place in product(range(2), range(8))]
    assert of_places(by_batch, 4) == 8, "batches of 4: their first prompts are 4 apart"


def test_lengths_go_on_where_the_one_before_ended() -> None:
    """Figures pool them: with one batch of each length, each would begin with the same method otherwise."""
    methods: list[Any] = [SimpleNamespace(name=name, takes=lambda size: True) for name in "abcd"]
    groups: list[list[Any]] = [[("prompt",)], [("two", "rows")], [("longer",)], [("two", "more")]]
    orders = {group: [m.name for m in order] for group, _, _, order in in_turn(methods, groups, repeats=1)}
    assert orders[0] == orders[1] == turn("abcd", 0), "batch sizes are not pooled"
    assert orders[2] == orders[3] == turn("abcd", 1)


def test_questions_are_answered_in_these_orders(results: dict[str, Any]) -> None:
    result = results["subtasks"]
    names = [method.name for method in result.methods]
    calls = sorted(result.calls, key=lambda call: call.position)
    prompts = list(dict.fromkeys(call.prompts for call in calls))
    for repeat, (place, asked) in product(range(2), enumerate(prompts)):
        found = [call.method for call in calls if (call.repeat, call.prompts) == (repeat, asked)]
        assert found == turn(names, turn_number(repeat, place, len(prompts), len(names)))


PROMPTS = [Prompt(0, "qa", (1, 2, 3))]


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
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


@pytest.mark.parametrize(("seconds", "prepared", "calls", "settled"), [
    ([9.0, 4.0, 1.0, 1.06, 1.02, 1.0], (), 5, True),  # two in a row have to agree
    ([1.0] * 9, (1, 1, 0, 1, 0), 3, True),  # which does not count while passes are still recorded
    ([1.0] * 9, (1, 1, 1, 1, 0), 5, True),
    ([2.0, 3.0] * 9, (), 12, False),  # the most
    ([300.0, 50.0, 9.0, 2.0, 1.0], (), 4, False),  # the time is over; that of the first does not count
    ([300.0, 70.0], (), 2, False),
])  # fmt: skip
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


def test_what_such_calls_took_is_kept(monkeypatch) -> None:
    """It is time to prepare, though it came after the warm-up."""
    seconds, made = iter([5.0, 3.0, 1.0]), iter([0, 1, 1, 2, 2, 2])
    monkeypatch.setattr(warming, "timed_call", lambda *args, **place: replace(plain_call(), seconds=next(seconds)))
    monkeypatch.setattr(warming, "prepared_so_far", lambda pair: next(made))
    call = warming.warm_call(plain(SimpleNamespace()), PROMPTS, Settings())  # type: ignore[arg-type]
    assert (call.seconds, call.again, call.preparing) == (1.0, 2, 4.0 + 2.0)
    plain_method = method("plain")
    part = part_of([call], [plain_method], cold=[ColdStart("plain", 1, 3, (9.0, 1.0), True)])
    assert speed.cold_seconds(part, plain_method, 1) == pytest.approx(8.0 + 6.0)


def test_recordings_are_counted(saved_pair: tuple[Path, Path], monkeypatch) -> None:
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


def test_refusals_are_said_in_one_line(clock: SimpleNamespace, monkeypatch) -> None:
    def refused(*args: Any) -> Any:
        raise ValueError("model: can't\n be done")

    monkeypatch.setattr(warming, "timed_call", refused)
    with pytest.raises(BenchError, match=r"^model: can't be done$"):
        warmed(clock, iter([]))
