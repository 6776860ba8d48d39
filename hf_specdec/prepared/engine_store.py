"""The engines kept between calls; they keep no models or weights alive, and the size of their caches is limited."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count
from weakref import finalize

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.traits import drafting_model, wrapped_model
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.buffers import Buffers
from hf_specdec.prepared.engine import Engine
from hf_specdec.prepared.engine_key import plan_key
from hf_specdec.prepared.prepared_passes import PreparedPasses
from hf_specdec.prepared.round_steps import Plan, Side

KEPT_BYTES = 2 << 30  # of idle caches on one device; the caches used last are kept even if they are larger
KEPT_ENGINES = 32  # small without caches; enough for a service's lengths, batch sizes and settings

_turns = count(1)


@dataclass
class EngineGroup:
    """The engines over the same buffers, by the keys of their plans. Only one of them runs at a time.

    Args:
        buffers: the shared buffers.
        compile: whether they compile their steps.
        passes: the prepared passes of general rounds, by the models' roles.
        used: a growing number that orders groups by their last use.
    """

    buffers: Buffers
    compile: bool
    engines: dict[Hashable, Engine] = field(default_factory=dict)
    passes: dict[str, PreparedPasses] = field(default_factory=dict)
    used: int = 0

    def engine_for(self, plan: Plan) -> Engine:
        """The engine for a call; new if none is kept for its plan."""
        key = plan_key(plan)
        if key not in self.engines:
            self.engines[key] = Engine(plan, self.buffers, self.compile)
        self.engines[key].take_over(plan)
        self.used = self.engines[key].used = next(_turns)
        return self.engines[key]

    def passes_of(self, side: Side, name: str) -> PreparedPasses:
        """A model's prepared passes, for general rounds; `name` is its role."""
        self.used = next(_turns)
        return self.passes.setdefault(name, PreparedPasses(side, self.buffers, name, compile=self.compile))

    def clear(self) -> None:
        """Free everything that was prepared."""
        self.engines.clear()
        self.passes.clear()


class EngineStore:
    """Idle engines. A call takes a group of them and puts it back, so that no two calls share buffers."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[EngineGroup]] = {}
        self._watched: set[int] = set()
        self._lock = threading.RLock()

    def take(self, key: Hashable, plan: Plan | None) -> EngineGroup | None:
        """Take an idle group of this key out of the store until `put`, if possible one with an engine for the plan.

        Without a plan, prefer one with prepared passes.
        """
        with self._lock:
            kept = self._kept.get(key, [])
            known = None if plan is None else plan_key(plan)
            kept.sort(key=lambda group: (known in group.engines if plan else bool(group.passes), group.used))
            return kept.pop() if kept else None

    def put(self, key: Hashable, group: EngineGroup) -> None:
        """Keep a group for later calls; the least recently used engines are dropped."""
        with self._lock:
            self.make_room(group.buffers.nbytes, group.buffers.state)
            self._kept.setdefault(key, []).append(group)
            engines = sorted(self.of_all(), key=lambda engine: engine.used)
            for engine in engines[: max(len(engines) - KEPT_ENGINES, 0)]:
                self._drop(engine)
            for model in group.buffers.models:
                if id(model) not in self._watched:
                    self._watched.add(id(model))
                    finalize(model, self._forget, id(model)).atexit = False

    def make_room(self, nbytes: int, like: Tensor) -> None:
        """Drop the least recently used caches, until `nbytes` more fit into the limit of `like`'s device.

        Captured steps are tied to their caches and dropped with them; other steps get new caches at the next call.
        """
        with self._lock:
            same = [group for group in self._groups() if group.buffers.state.device == like.device]
            held = sum(group.buffers.nbytes for group in same)
            for group in sorted(same, key=lambda group: group.used):
                if held + nbytes <= KEPT_BYTES:
                    return
                held -= group.buffers.nbytes
                if cuda_graphs.captures(like.device):
                    group.clear()
                else:
                    group.buffers.drop_caches()
            self._clean()

    def release(self, model: PreTrainedModel | None) -> None:
        """Drop the engines of a model, as target or draft; all of them for None."""
        with self._lock:
            for group in list(self._groups()):
                if model is None or any(one is model for one in group.buffers.models) or not group.buffers.alive:
                    group.clear()
            self._clean()

    def drop_unusable(self) -> None:
        """Drop the engines of models that were deleted or moved to another device."""
        with self._lock:
            for group in list(self._groups()):
                if not group.buffers.alive:
                    group.clear()
            self._clean()

    def of_all(self) -> list[Engine]:
        """All idle engines."""
        with self._lock:
            return [engine for group in self._groups() for engine in group.engines.values()]

    def of(self, target: PreTrainedModel, *, compile: bool) -> list[Engine]:
        """The idle engines of a target for calls with or without `compile`."""
        return [engine for engine in self.of_all() if engine.target.held() is target and engine.compile == compile]

    def prepared_passes(self, target: PreTrainedModel) -> int:
        """The number of prepared passes of general rounds for a target and its drafts."""
        with self._lock:
            mine = [group for group in self._groups() if group.buffers.target.held() is target]
            return sum(passes.made for group in mine for passes in group.passes.values())

    def _groups(self) -> Iterator[EngineGroup]:
        return (group for groups in self._kept.values() for group in groups)

    def _drop(self, engine: Engine) -> None:
        for group in self._groups():
            if group.buffers is engine.buffers:
                group.engines = {key: one for key, one in group.engines.items() if one is not engine}
        self._clean()

    def _clean(self) -> None:
        """Drop groups in which nothing is prepared."""
        left = {key: [group for group in groups if group.engines or group.passes] for key, groups in self._kept.items()}
        self._kept = {key: groups for key, groups in left.items() if groups}

    def _forget(self, watched: int) -> None:
        with self._lock:
            self._watched.discard(watched)
            self.drop_unusable()


STORE = EngineStore()


def kept_engines(model: PreTrainedModel, *, compile: bool) -> list[Engine]:
    """The idle engines of a target for calls with or without `compile`, whose steps can be timed separately."""
    return STORE.of(model, compile=compile)


def release(model: PreTrainedModel | None = None) -> None:
    """Free what compiled and captured rounds keep for later calls: caches, buffers, graphs and compiled steps.

    Later calls prepare them again.

    Args:
        model: a target or draft, possibly wrapped; None for all models.
    """
    STORE.release(wrapped_model(drafting_model(model)))
