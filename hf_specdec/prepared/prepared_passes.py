"""`PreparedPasses`: compiled or captured passes over few tokens, for rounds that cannot be prepared as a whole.

Processors that read the text, the recording of scores and drafters that read hidden states run in Python; only the
model's pass is prepared: for each width, after the first pass of that width, and for texts of all lengths.
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
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.buffers import Buffers, ordinary_tensors
from hf_specdec.prepared.compiled_step import Step, forget_codes
from hf_specdec.prepared.own_builds import tell_going_without
from hf_specdec.prepared.round_steps import Side
from hf_specdec.rules.round_statistics import Round

WIDEST = 17  # tokens of a row; wider passes are prompts and drafts that catch up


class PreparedPasses:
    """The prepared passes of one model over all rows of a batch.

    Args:
        side: the model with its cache.
        buffers: the side's buffers.
        name: the model's role, shown while a pass compiles.
        compile: compile the passes, which are captured in any case where the device can.

    Attributes:
        failed: whether preparing a pass failed; then no further ones are prepared.
    """

    def __init__(self, side: Side, buffers: Buffers, name: str, *, compile: bool) -> None:
        self._side, self._buffers, self._name, self._compile = side, buffers, name, compile
        self._captures = cuda_graphs.captures(side.positions.device)
        # By width, with the tokens and slots that the step reads: a captured one reads the same tensors at every call.
        self._steps: dict[int, tuple[Step, Tensor, Tensor]] = {}
        self._lacking: set[int] = set()
        self.failed = False

    @property
    def made(self) -> int:
        """The number of prepared widths."""
        return len(self._steps)

    def run(self, tokens: Tensor, slots: Tensor, span: int) -> tuple[Tensor, Tensor | None] | None:
        """Read `tokens` into `slots`, both `[B, k]`; return logits `[B, k, V]`, or None if no pass is prepared for it.

        The hidden states `[B, k, H]` of the side's `layers_read` come second. A narrower pass may run in one of up to
        twice the width: the excess is overwritten before it is seen. All slots are below `span`.
        """
        wanted = tokens.shape[1]
        width = min((known for known in self._steps if wanted <= known <= 2 * wanted + 1), default=None)
        if width is None:
            self._lacking |= {wanted} if wanted <= WIDEST else set()
            return None
        spare = width - wanted
        if span + spare > self._side.cache.capacity:
            return None
        step, *given = self._steps[width]
        with ordinary_tensors():
            more = slots[:, -1:] + torch.arange(1, spare + 1, device=slots.device)
            torch.cat([tokens, tokens[:, -1:].expand(-1, spare)], dim=1, out=given[0])
            torch.cat([slots, more], dim=1, out=given[1])
            logits, *states = (one[:, :wanted] for one in step(*given))
            if self._captures:  # later passes overwrite the results
                logits, states = logits.clone(), [one.clone() for one in states]
        return logits, states[0] if states else None

    def prepare(self, read: Sequence[int]) -> None:
        """Prepare the widths that were missing, over the slots after those `read` of each row."""
        for width in sorted(self._lacking, reverse=True):
            self._lacking.discard(width)
            if (
                self.failed
                or max(read) + width > self._side.cache.capacity
                or any(width <= known <= 2 * width + 1 for known in self._steps)
            ):
                continue
            try:
                with ordinary_tensors():
                    self._steps[width] = self._prepared(read, width)
            except BaseException as error:
                forget_codes()
                if not isinstance(error, Exception):
                    raise
                self._give_up(error)
                return

    def _prepared(self, read: Sequence[int], width: int) -> tuple[Step, Tensor, Tensor]:
        """A prepared pass, and the tokens and slots that it reads."""
        device = self._side.positions.device
        slots = torch.tensor(read, device=device).unsqueeze(1) + torch.arange(width, device=device)
        given = torch.zeros_like(slots), slots
        step = cuda_graphs.prepare(
            partial(_pass, self._side),
            device,
            f"{self._name} of {width}",
            given,
            compile=self._compile,
            pool=self._buffers.pool,
            lent=self._buffers.lent,
        )
        step(*given)
        if self._compile:
            self._buffers.gather_pages()
        return step, *given

    def _give_up(self, error: Exception) -> None:
        """Continue without compiling where passes can still be captured, else without prepared passes."""
        tell_going_without("compile=True" if self._compile else "CUDA graphs", error)
        self.failed = not (self._compile and self._captures)
        self._compile = False


def _pass(side: Side, tokens: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    outputs = side.run(tokens, slots, None)
    states = [states_of(outputs, side.layers_read, tokens.shape[1])] if side.layers_read else []
    return outputs.logits, *states


@dataclass(frozen=True)
class RoundsOfPasses:
    """General rounds with prepared passes, which are prepared between rounds.

    Args:
        general: makes the rounds.
        passes: the prepared passes, and the runners that use them.
    """

    general: Decoder
    passes: Sequence[tuple[StaticRunner, PreparedPasses]]

    @property
    def mode(self) -> type[torch.inference_mode] | type[torch.no_grad]:
        """The general rounds' mode."""
        return self.general.mode

    def make_round(self, transcript: Transcript) -> Round:
        """Make a general round; preparing passes does not count as its time."""
        for runner, passes in self.passes:
            if any(runner.read):
                passes.prepare(runner.read)
            runner.prepared = passes if passes.made or not passes.failed else None
        return self.general.make_round(transcript)
