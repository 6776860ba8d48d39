"""`CompiledPasses`: compiled passes over few tokens, for rounds that cannot be compiled as a whole.

Processors that read the text and the recording of scores run in Python; only the model's pass is compiled: for each
width, after the first pass of that width, and for texts of all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_specdec.decoding import Decoder
from hf_specdec.host.transcript import Transcript
from hf_specdec.models.hidden_states import states_of
from hf_specdec.models.static_runner import StaticRunner
from hf_specdec.prepared.buffers import Buffers, ordinary_tensors
from hf_specdec.prepared.compiled_step import CompiledStep, forget_codes
from hf_specdec.prepared.own_builds import tell_going_without
from hf_specdec.prepared.round_steps import Side
from hf_specdec.rules.round_statistics import Round

WIDEST = 17  # tokens of a row; wider passes are prompts and drafts that catch up


class CompiledPasses:
    """The compiled passes of one model over all rows of a batch.

    Args:
        side: the model with its cache.
        buffers: the side's buffers.
        name: the model's role, shown while a pass compiles.

    Attributes:
        failed: whether compiling a pass failed; then none is compiled.
    """

    def __init__(self, side: Side, buffers: Buffers, name: str) -> None:
        self._side, self._buffers, self._name = side, buffers, name
        self._steps: dict[int, CompiledStep] = {}
        self._lacking: set[int] = set()
        self.failed = False

    @property
    def made(self) -> int:
        """The number of compiled widths."""
        return len(self._steps)

    def run(self, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Read `tokens` into `slots`, both `[B, k]`; return logits `[B, k, V]`, or None if no pass is compiled for it.

        The hidden states `[B, k, H]` of the side's `layers_read` come second. A narrower pass may run in one of up to
        twice the width: the excess is overwritten before it is seen.
        """
        wanted = tokens.shape[1]
        width = min((known for known in self._steps if wanted <= known <= 2 * wanted + 1), default=None)
        if width is None:
            self._lacking |= {wanted} if wanted <= WIDEST else set()
            return None
        last = int(slots.max()) + width - wanted
        if last >= self._side.cache.capacity:
            return None
        with ordinary_tensors():
            spare = torch.arange(1, width - wanted + 1, device=slots.device)
            read = torch.cat([tokens, tokens[:, -1:].expand(-1, len(spare))], dim=1)
            done = self._steps[width](read, torch.cat([slots, slots[:, -1:] + spare], dim=1))
        logits, *states = (one[:, :wanted] for one in done)
        return logits, states[0] if states else None

    def prepare(self, read: Sequence[int]) -> None:
        """Compile the widths that were missing, over the slots after those `read` of each row."""
        device, capacity = self._side.positions.device, self._side.cache.capacity
        for width in sorted(self._lacking, reverse=True):
            self._lacking.discard(width)
            if (
                self.failed
                or max(read) + width > capacity
                or any(width <= known <= 2 * width + 1 for known in self._steps)
            ):
                continue
            step = CompiledStep(partial(_pass, self._side), device, f"{self._name} of {width}", self._buffers.lent)
            slots = torch.tensor(read, device=device).unsqueeze(1) + torch.arange(width, device=device)
            try:
                with ordinary_tensors():
                    step(torch.zeros_like(slots), slots)
            except BaseException as error:
                forget_codes()
                if not isinstance(error, Exception):
                    raise
                self.failed = True
                tell_going_without("compile=True", error)
                return
            self._steps[width] = step
            self._buffers.gather_pages()


def _pass(side: Side, tokens: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    outputs = side.run(tokens, slots, None)
    states = [states_of(outputs, side.layers_read, tokens.shape[1])] if side.layers_read else []
    return outputs.logits, *states


@dataclass(frozen=True)
class RoundsOfPasses:
    """General rounds with compiled passes; passes are compiled between rounds.

    Args:
        general: makes the rounds.
        passes: the compiled passes, and the runners that use them.
    """

    general: Decoder
    passes: Sequence[tuple[StaticRunner, CompiledPasses]]

    @property
    def mode(self) -> type[torch.inference_mode] | type[torch.no_grad]:
        """The general rounds' mode."""
        return self.general.mode

    def make_round(self, transcript: Transcript) -> Round:
        """Make a general round; compiling does not count as its time."""
        for runner, passes in self.passes:
            if any(runner.read):
                passes.prepare(runner.read)
        return self.general.make_round(transcript)
