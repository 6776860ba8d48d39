"""State that calls of the same target share, such as recordings and measurements."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

KEPT_SITUATIONS = 16  # per target

T = TypeVar("T")


class PerTarget(Generic[T]):
    """One value per target and situation, dropped together with the target; safe to use from several threads.

    A target keeps its `KEPT_SITUATIONS` most recently used situations. Values must not refer to their target, which
    would keep it alive.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Any, OrderedDict[Hashable, T]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, target: object, situation: Hashable, make: Callable[[], T]) -> T:
        """The value of a situation; made on first use."""
        with self._lock:
            values = self._values.setdefault(target, OrderedDict())
            if situation not in values:
                values[situation] = make()
            values.move_to_end(situation)
            while len(values) > KEPT_SITUATIONS:
                values.popitem(last=False)
            return values[situation]

    def all_of(self, target: object) -> Mapping[Hashable, T]:
        """A target's values by situation, the most recently used last."""
        with self._lock:
            return OrderedDict(self._values.get(target, {}))
