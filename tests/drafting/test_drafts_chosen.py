"""`drafter="auto"` on simulated calls: never much slower than decoding plainly, nor than the best fixed setting."""

from __future__ import annotations

from itertools import product

import pytest
from helpers.simulated_texts import World, auto, hybrid, model, plain, suffix

FIXED = [plain, *map(model, (1, 2, 4, 8, 16)), *map(suffix, (2, 8)), hybrid(4)]
GRID = [*product((0.0, 0.6, 0.9), (0.0, 0.03, 0.15), (0.05, 0.3, 1.0), (0.03, 0.2))]
NAMES = "right", "spans", "step", "wider"


@pytest.mark.parametrize(NAMES, GRID)
def test_no_fixed_setting_is_much_faster(right: float, spans: float, step: float, wider: float) -> None:
    """0.95 of the fastest of ten texts that follow one another, and 0.98 of plain decoding; the first one included."""
    world = World(right, spans, step, wider)
    found = world.speed(auto())
    assert found >= 0.95 * max(world.speed(one) for one in FIXED)
    assert found >= 0.98 * world.speed(plain)
