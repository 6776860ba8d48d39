"""Turns: every place, and every neighbour, equally often, in all repeats and for each example in other orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.bench.running.measuring import in_turn
from hf_specdec.bench.running.turns import cycle, turn, turn_number

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
    assert sorted(numbers) == list(range(places * repeats))
    assert of_places(orders, count) <= 1
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
