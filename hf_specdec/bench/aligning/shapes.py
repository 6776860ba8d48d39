"""Chooses the layers of a draft: trains several candidates briefly and takes the one with the best predicted speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hf_specdec
from hf_specdec.bench.aligning.batches import Collator
from hf_specdec.bench.aligning.clock import Clock
from hf_specdec.bench.aligning.shape import cut_draft, layer_changes, layers_that_change_most
from hf_specdec.bench.figures.passes import predicted_speedup
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.inputs.questions import OWN
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Training
from hf_specdec.bench.running.bare_passes import BarePasses

_COUNTS = (2, 4, 6)  # layers
_SAMPLE = 16  # held-out answers by which shapes are compared: all would take most of a short trial
_LOOKAHEADS = (1, 2, 3, 4, 6)
_SAMPLES = 5  # of each pass


class Trials:
    """Short trainings of several shapes.

    Args:
        target: the target, without a draft.
        tokens: the tokens that drafts propose.
        held_out: answers that are not learned from.
        fit: trains a draft; see `training.train`.
        folder: where trials are stored; the caller deletes it.
        seconds: the time of all trials together.
        dtype: that of the draft when it decodes.
    """

    def __init__(
        self, target: LoadedPair, tokens: list[int], held_out: Any, fit: Callable[..., Training], folder: Path,
        seconds: float, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.target, self.tokens, self.fit, self.dtype = target, tokens, fit, dtype
        self.held_out = held_out.select(range(min(_SAMPLE, len(held_out))))
        self.folder, self.seconds = folder, seconds
        self.notes: list[str] = []
        # The compiled steps of other models would take minutes for each shape.
        self.engine = "compiled" if target.encoder_decoder else "recorded"

    def best(self) -> tuple[int, ...]:
        """The layers of the shape with the highest predicted speed."""
        shapes = self._shapes()
        found = {layers: self._speed(layers, self.seconds / len(shapes)) for layers in shapes}
        return max(found, key=lambda layers: found[layers])

    def _shapes(self) -> list[tuple[int, ...]]:
        """The first layer alone, the two to six that change most, and the first three with the last."""
        changes = layer_changes(self.target.target, Collator(self.target)(list(self.held_out)))
        counts = [count for count in _COUNTS if count <= len(changes)]
        found = [layers_that_change_most(changes, count) for count in counts]
        return list(dict.fromkeys([(0,), *found, (*range(min(3, len(changes))), len(changes))]))

    def _speed(self, layers: tuple[int, ...], seconds: float) -> float:
        folder = self.folder / "-".join(map(str, layers))
        folder.mkdir(parents=True, exist_ok=True)
        pair = self._with(layers)
        clock = Clock(folder / "seconds", seconds)
        facts = self.fit(pair=pair, draft=pair.draft, held_out=self.held_out, folder=folder, clock=clock)
        agreed = max(share for _, share in facts.agreement)
        step, verifying = self._passes(self._with(layers))
        speed = max(predicted_speedup(agreed, step, verifying[n], n) for n in _LOOKAHEADS)
        self.notes.append(
            f"Layers {', '.join(map(str, layers))}: {agreed:.1%} agreement with the target after {facts.seconds:.0f} s "
            f"of training ({facts.steps} steps), c = {step:.3f} on {self.engine} passes, predicted speed {speed:.2f}."
        )
        return speed

    def _with(self, layers: tuple[int, ...]) -> LoadedPair:
        draft = cut_draft(self.target.target, layers, self.tokens)
        return replace(self.target, draft=draft, draft_name="trial", draft_tokenizer=self.target.tokenizer)

    def _passes(self, pair: LoadedPair) -> tuple[float, dict[int, float]]:
        """c, and v by number of drafted tokens."""
        assert pair.draft is not None
        hf_specdec.trim_draft_head(pair.draft.to(self.dtype))
        first = self.held_out[0]
        prompt = Prompt(0, OWN, tuple(first["prompt"]), recording=first.get("recording"))
        passes = BarePasses(pair, 64, [1, *(n + 1 for n in _LOOKAHEADS)])
        times = [one for _ in range(_SAMPLES) for one in passes.sample(self.engine, [prompt])]

        def typical(role: str, width: int) -> float:
            return median(seconds for kind, tokens, seconds in times if (kind, tokens) == (role, width))

        one = typical("target", 1)
        return typical("draft", 1) / one, {n: typical("target", n + 1) / one for n in _LOOKAHEADS}
