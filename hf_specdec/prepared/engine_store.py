"""The engines that stay between calls, bounded in bytes; none keeps its models alive."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from weakref import finalize

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.traits import drafting_model, wrapped_model
from hf_specdec.prepared.engine import Engine

KEPT_BYTES = 2 << 30  # of idle engines on one device; the last used stays even if it is larger
KEPT_ENGINES = 8


class EngineStore:
    """Idle engines, the last used last. A call takes one and puts it back, so that no two calls share it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Engine] = OrderedDict()
        self._watched: set[int] = set()
        self._lock = threading.RLock()

    def take(self, key: Hashable) -> Engine | None:
        """The idle engine of this key, or None. Nobody else gets it until it is put back."""
        with self._lock:
            return self._kept.pop(key, None)

    def put(self, key: Hashable, engine: Engine) -> None:
        """Keep an engine for later calls; those used longest ago make room."""
        with self._lock:
            self.make_room(engine.nbytes, engine.state)
            self._kept[key] = engine
            while len(self._kept) > KEPT_ENGINES:
                self._kept.popitem(last=False)
            for side in (engine.target, engine.draft):
                model = None if side is None else side.held()
                if model is not None and id(model) not in self._watched:
                    self._watched.add(id(model))
                    finalize(model, self._forget, id(model)).atexit = False

    def make_room(self, nbytes: int, like: Tensor) -> None:
        """Drop the engines used longest ago, until `nbytes` more stay within the bound of `like`'s device."""
        with self._lock:
            same = [key for key, engine in self._kept.items() if engine.state.device == like.device]
            held = sum(self._kept[key].nbytes for key in same)
            for key in same:
                if held + nbytes <= KEPT_BYTES:
                    return
                held -= self._kept.pop(key).nbytes

    def release(self, model: PreTrainedModel | None) -> None:
        """Drop the engines of a model, as target or draft; all of them for None."""
        with self._lock:
            for key, engine in list(self._kept.items()):
                if model is None or engine.runs(model) or not engine.alive:
                    del self._kept[key]

    def drop_unusable(self) -> None:
        """Drop the engines of models that are gone or were moved to another device."""
        with self._lock:
            for key, engine in list(self._kept.items()):
                if not engine.alive:
                    del self._kept[key]

    def of_all(self) -> list[Engine]:
        """All idle engines."""
        with self._lock:
            return list(self._kept.values())

    def of(self, target: PreTrainedModel, *, compile: bool) -> list[Engine]:
        """The idle engines of a target for calls with or without `compile`."""
        return [engine for engine in self.of_all() if engine.target.held() is target and engine.compile == compile]

    def _forget(self, watched: int) -> None:
        with self._lock:
            self._watched.discard(watched)
            self.drop_unusable()


STORE = EngineStore()


def kept_engines(model: PreTrainedModel, *, compile: bool) -> list[Engine]:
    """The idle engines of a target for calls with or without `compile`, whose steps can be timed on their own."""
    return STORE.of(model, compile=compile)


def release(model: PreTrainedModel | None = None) -> None:
    """Give back what compiled and captured rounds keep for later calls: caches, buffers, graphs and compiled steps.

    Later calls prepare them anew.

    Args:
        model: a target or draft, in wrappers or not; None for all models.
    """
    STORE.release(wrapped_model(drafting_model(model)))
