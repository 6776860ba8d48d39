"""`Buffers`: the memory that prepared steps read and write besides weights, independent of a call's settings."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.static_runner import StaticRunner
from hf_specdec.models.stored_tensors import tensors_of
from hf_specdec.models.traits import context_length
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.huge_pages import HugePages
from hf_specdec.prepared.lent_tensors import Lent
from hf_specdec.prepared.round_steps import Side


class Buffers:
    """The caches and other buffers of a target and its draft; serves one call at a time.

    Args:
        target, draft: the models' runners before their first pass, whose caches are kept. Without a draft, None.

    Attributes:
        target, draft: the models, weakly held, with their caches.
        state: `[B, 4]`, see `verify_step`.
        pool: see `cuda_graphs.new_pool`.
        lent: lends weights and caches to compiled steps, which hold neither between calls.
        reached: the slots of each row that calls have written to.
    """

    def __init__(self, target: StaticRunner, draft: StaticRunner | None) -> None:
        device = target.positions.device
        self.target = _side(target)
        self.draft = None if draft is None else _side(draft)
        self.state = torch.zeros(len(target.read), 4, dtype=torch.long, device=device)
        # Not shared: another call's engine may run between the drafts and their verification.
        self.pool = cuda_graphs.new_pool(device)
        self.lent = Lent(
            *(partial(_weights, side) for side in self._sides), *(side.cache.tensors for side in self._sides)
        )
        self._pages: HugePages | None = None
        self.reached = 0

    @property
    def _sides(self) -> list[Side]:
        return [side for side in (self.target, self.draft) if side is not None]

    @contextmanager
    def used_by(self, target: StaticRunner, draft: StaticRunner | None, tokens: int) -> Iterator[None]:
        """Let a call's runners use the buffers, so that they read the prompt into them.

        The call writes to the first `tokens` slots of each row, including drafts. The caches start from zeros: a NaN
        of an earlier call would pass through masks, as 0 · NaN is NaN.
        """
        with self.in_use():
            with ordinary_tensors():
                for side, runner in ((self.target, target), (self.draft, draft)):
                    if side is not None and runner is not None:
                        side.positions.copy_(_bounded_positions(runner))
                        side.visible.copy_(runner.visible)
                        side.cache.clear(self.reached)
                        runner.cache, runner.positions, runner.visible = side.cache, side.positions, side.visible
            self.reached = max(self.reached, tokens)
            if self._pages is not None:
                self.gather_pages()
            yield

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Allow steps to run in the block; afterwards nothing of the models is held."""
        with ordinary_tensors():
            for side in self._sides:
                side.cache.allocate()
        try:
            yield
        finally:
            self.lent.take_back()

    def drop_caches(self) -> None:
        """Free the memory of the caches until the next use. Captured steps must not run after this."""
        for side in self._sides:
            side.cache.drop()
        self.reached = 0

    @property
    def nbytes(self) -> int:
        """The memory of the state and of the used part of the caches, in bytes."""
        caches = sum(stored.nbytes for side in self._sides for stored in side.cache.tensors())
        used = self.reached / self.target.cache.capacity if self.state.device.type == "cpu" else 1
        return self.state.nbytes + int(caches * min(used, 1))

    @property
    def alive(self) -> bool:
        """Whether the models still exist, on the device of the buffers."""
        models = [side.held() for side in self._sides]
        return all(model is not None and model.device == self.state.device for model in models)

    @property
    def models(self) -> list[PreTrainedModel]:
        """Target and draft, if they still exist."""
        return [model for side in self._sides if (model := side.held()) is not None]

    def gather_pages(self) -> None:
        """Continue moving weights into huge pages; caches would then take memory for slots that no text reaches."""
        read = [tensor for side in self._sides for tensor in _weights(side)]
        if self._pages is None or not self._pages.are_for(read):
            self._pages = HugePages(read)
        self._pages.gather()


def ordinary_tensors() -> AbstractContextManager[None]:
    """Disable gradients, but make tensors that later calls can write to outside the caller's `inference_mode`."""
    return _outside_inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def _weights(side: Side) -> list[Tensor]:
    model = side.held()
    return [] if model is None else tensors_of(model)


def _side(runner: StaticRunner) -> Side:
    positions, visible = _bounded_positions(runner).clone(), runner.visible.clone()
    return Side(weakref.ref(runner.model), runner.cache, positions, visible, runner.outputs, runner.layers_read)


def _bounded_positions(runner: StaticRunner) -> Tensor:
    """Positions clamped to the model's tables; only drafts past a text's end, which are dropped, exceed them."""
    bound = context_length(runner.model)
    return runner.positions if bound is None else runner.positions.clamp(max=bound - 1)
