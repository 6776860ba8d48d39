"""`drafter="auto"` on simulated calls: never much slower than decoding plainly, nor than the best fixed setting."""

from itertools import product

import pytest
from helpers.pairwise import pairwise
from helpers.simulated_texts import World, auto, hybrid, model, plain, suffix

from hf_specdec.lengths.history import LengthHistory

FIXED = [plain, *map(model, (1, 2, 4, 8, 16)), *map(suffix, (2, 8)), hybrid(4)]
NAMES = "right", "spans", "step", "wider"
NEVER = [(0.0, 0.0, step, wider) for step, wider in product((0.05, 0.3, 1.0), (0.03, 0.2))]
SOMETIMES = [
    row for row in pairwise((0.0, 0.3, 0.6, 0.9), (0.0, 0.03, 0.15), (0.05, 0.3, 1.0), (0.03, 0.2)) if any(row[:2])
]
CALLS = 20  # of one pair, one after the other; the first of them, which knows nothing, is counted too


@pytest.mark.parametrize(NAMES, SOMETIMES)
def test_no_fixed_setting_is_much_faster(right: float, spans: float, step: float, wider: float) -> None:
    world = World(right, spans, step, wider)
    found = world.speed(auto(), CALLS)
    assert found >= 0.95 * max(world.speed(one, CALLS) for one in FIXED)
    assert world.speed(auto(has_model=False), CALLS) >= 0.95 * max(
        world.speed(one, CALLS) for one in (plain, suffix(2), suffix(8))
    )


@pytest.mark.parametrize(("tokens", "calls", "share"), [(128, CALLS, 0.98), (32, 4 * CALLS, 0.97)])
@pytest.mark.parametrize(NAMES, NEVER)
def test_what_never_pays_costs_next_to_nothing(
    right: float, spans: float, step: float, wider: float, tokens: int, calls: int, share: float
) -> None:
    world = World(right, spans, step, wider, tokens=tokens)
    least = share * world.speed(plain, calls)
    assert world.speed(auto(), calls) >= least
    assert world.speed(auto(has_model=False), calls) >= least


@pytest.mark.parametrize("rows", [4])
@pytest.mark.parametrize(NAMES, [(0.0, 0.0, 0.3, 0.2), (0.6, 0.15, 0.3, 0.03), (0.9, 0.03, 0.05, 0.2)])
def test_in_batches(right: float, spans: float, step: float, wider: float, rows: int) -> None:
    world = World(right, spans, step, wider, rows=rows)
    found = world.speed(auto(), CALLS)
    assert found >= 0.95 * max(world.speed(one, CALLS) for one in FIXED)
    assert found >= 0.98 * world.speed(plain, CALLS)


@pytest.mark.parametrize(("tokens", "calls"), [(128, CALLS), (32, 4 * CALLS)])
@pytest.mark.parametrize(("wider", "jump"), [(0.02, 0.0), (0.05, 0.3)])
def test_the_target_as_its_own_draft_costs_next_to_nothing(tokens: int, calls: int, wider: float, jump: float) -> None:
    """Always right, it loses so little that the noise of times may look like a gain."""
    world = World(1.0, 0.0, 1.0, wider, jump, tokens=tokens)
    assert world.speed(auto(), calls) >= 0.98 * world.speed(plain, calls)


@pytest.mark.parametrize(("tokens", "calls"), [(128, CALLS), (32, 4 * CALLS)])
def test_look_ups_rest_where_they_find_nothing(tokens: int, calls: int) -> None:
    """Each takes a tenth of a plain step. With a model, probes take a hundredth of the time besides."""
    world = World(0.0, 0.0, 0.3, tokens=tokens, look_up=0.1)
    alone = world.speed(plain, calls)
    assert world.speed(auto(), calls) >= 0.97 * alone
    assert world.speed(auto(has_model=False), calls) >= 0.98 * alone


@pytest.mark.parametrize(("right", "spans"), [(0.0, 0.05), (0.0, 0.15), (0.6, 0.15), (0.9, 0.03)])
def test_look_ups_go_on_where_copies_pay(right: float, spans: float) -> None:
    world = World(right, spans, 0.3, look_up=0.1)
    assert world.speed(auto(), CALLS) >= 0.95 * max(world.speed(one, CALLS) for one in FIXED)


def test_control_look_ups_without_rest_are_too_slow(monkeypatch) -> None:
    monkeypatch.setattr(LengthHistory, "pay_look_up", lambda self, saved: None)
    world = World(0.0, 0.0, 0.3, look_up=0.1)
    assert world.speed(auto(has_model=False), CALLS) < 0.95 * world.speed(plain, CALLS)


@pytest.mark.parametrize(
    "seconds",
    [lambda self, copied, steps: 1.0, lambda self, copied, steps: 1.0 + 10.0 * max(copied, steps)],
    ids=["time is nothing", "time is all"],
)
def test_control_a_choice_at_wrong_times_is_slower(seconds, monkeypatch) -> None:
    """Copies as long as they may be, and none at all, where short ones pay."""
    world = World(0.0, 0.05, 1.0, 0.2)
    right = world.speed(auto(has_model=False), CALLS)
    monkeypatch.setattr(LengthHistory, "seconds", seconds)
    assert world.speed(auto(has_model=False), CALLS) < 0.95 * right


def test_the_same_times_give_the_same_choices() -> None:
    calls = [
        [world.call(make, seed)[1] for seed in range(3)]
        for world in [World(0.6, 0.05, 0.3)]
        for make in (auto(), auto())
    ]
    assert calls[0] == calls[1]
