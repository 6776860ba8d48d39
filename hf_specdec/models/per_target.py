"""What a target's calls have taught its later ones; it goes with the target."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

KEPT_SITUATIONS = 16  # of a target

T = TypeVar("T")


class PerTarget(Generic[T]):
    """One lesson for each target and situation; of a target's too many situations the least used goes.

    PerTarget must not refer to their target, which they would keep alive.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, OrderedDict[Hashable, T]] = WeakKeyDictionary()

    def of(self, target: object, situation: Hashable, fresh: Callable[[], T]) -> T:
        """What was learnt in this situation; a `fresh` lesson at first."""
        known = self._known.setdefault(target, OrderedDict())
        if situation not in known:
            known[situation] = fresh()
        known.move_to_end(situation)
        while len(known) > KEPT_SITUATIONS:
            known.popitem(last=False)
        return known[situation]

    def all_of(self, target: object) -> Mapping[Hashable, T]:
        """A target's lessons by situation, the last used last."""
        return self._known.get(target, OrderedDict())
