"""`PerTarget`: what calls learn is kept by target and situation, and freed with the target."""

import gc
import weakref

from hf_specdec.models.per_target import KEPT_SITUATIONS, PerTarget


class Target:
    """Anything that can be referred to weakly."""


def test_a_lesson_is_a_situation_s_own_and_goes_with_the_target() -> None:
    kept: PerTarget[set[str]] = PerTarget()
    target = Target()
    first = kept.of(target, "greedy", set)
    assert kept.of(target, "greedy", set) is first and kept.of(target, "sampling", set) is not first
    assert kept.of(Target(), "greedy", set) is not first
    assert list(kept.all_of(target)) == ["greedy", "sampling"]
    gone = weakref.ref(first)
    del target, first
    gc.collect()
    assert gone() is None


def test_of_many_situations_the_least_used_is_forgotten() -> None:
    kept: PerTarget[list[int]] = PerTarget()
    target = Target()
    first, second = kept.of(target, "first", list), kept.of(target, "second", list)
    for number in range(KEPT_SITUATIONS - 1):
        kept.of(target, number, list)
        assert kept.of(target, "first", list) is first
    assert len(kept.all_of(target)) == KEPT_SITUATIONS
    assert kept.of(target, "second", list) is not second
