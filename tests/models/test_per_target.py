"""`lessons`: what calls teach is kept by target and situation, and no longer than its target."""

from __future__ import annotations

import gc
import weakref

from hf_specdec.models.per_target import KEPT_SITUATIONS, PerTarget


class Target:
    """Anything that can be referred to weakly."""


def test_a_lesson_is_a_situation_s_own_and_goes_with_the_target() -> None:
    lessons: PerTarget[set[str]] = PerTarget()
    target = Target()
    first = lessons.of(target, "greedy", set)
    assert lessons.of(target, "greedy", set) is first
    assert lessons.of(target, "sampling", set) is not first
    assert lessons.of(Target(), "greedy", set) is not first
    assert list(lessons.all_of(target)) == ["greedy", "sampling"]
    gone = weakref.ref(first)
    del target, first
    gc.collect()
    assert gone() is None


def test_of_many_situations_the_least_used_is_forgotten() -> None:
    lessons: PerTarget[list[int]] = PerTarget()
    target = Target()
    first, second = lessons.of(target, "first", list), lessons.of(target, "second", list)
    for number in range(KEPT_SITUATIONS - 1):
        lessons.of(target, number, list)
        assert lessons.of(target, "first", list) is first
    assert len(lessons.all_of(target)) == KEPT_SITUATIONS
    assert lessons.of(target, "second", list) is not second
