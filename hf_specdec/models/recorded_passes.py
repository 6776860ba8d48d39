"""Passes without Python in them, on a CPU: recorded as the model runs, replayed by TorchScript's interpreter.

Calling a small model takes longer than what it computes. A recording replays the model's very operations, to the bit,
needs no compiler, and takes as long to make as some thirty passes. It holds no weights and no caches: whatever may
change is its input, so that it costs no memory to speak of and serves all lengths of text. What it can't know of is
Python in a model that does more than call operations; such models run as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_specdec.models.fingerprint import has_fixed_rope, runs_custom_python, shapes_of, state_of
from hf_specdec.models.per_target import PerTarget

EAGER_PASSES = 8  # of a shape with the model as it is before they are recorded
AGREEING_TRIALS = 2  # of a shape with a recording, in which both have to agree in every bit
MAX_RECORDINGS = 4  # recordings of a model; shapes that none of them serves run as the model does

Step = Callable[..., Tensor]


@dataclass
class _Shape:
    """How far a shape has come: its passes, the recording it tries or uses, and in how many trials that agreed."""

    passes: int = 0
    recording: int = 0
    agreed: int = 0


class Recorded:
    """A step as it is at first, later its recordings: most shapes share one, and each has proved it the same."""

    def __init__(self) -> None:
        self._recordings: list[Step] = []
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._refused = False

    @property
    def made(self) -> int:
        """How many recordings there are."""
        return len(self._recordings)

    def run(self, step: Step, inputs: Sequence[Tensor], span: int) -> Tensor:
        """What `step(*inputs)` returns, and does to its inputs.

        Args:
            step: the same one at every call but for its closure, which holds nothing that changes beside the inputs.
            inputs: every tensor that a call may find changed; the first one's shape tells shapes apart.
            span: slots that attention looks at; shapes prove themselves anew where it has doubled.
        """
        shape = self._shapes.setdefault((*inputs[0].shape, span.bit_length()), _Shape())
        if shape.agreed >= AGREEING_TRIALS:
            return _replay(self._recordings[shape.recording], inputs)
        shape.passes += 1
        if shape.recording < len(self._recordings):
            return self._tried(step, inputs, shape)
        if shape.passes < EAGER_PASSES or len(self._recordings) == MAX_RECORDINGS or self._refused:
            return step(*inputs)
        return self._record(step, inputs)

    def _tried(self, step: Step, inputs: Sequence[Tensor], shape: _Shape) -> Tensor:
        """Replay a recording and run the step: once more that they agree, or on to the next recording."""
        try:
            replayed = _replay(self._recordings[shape.recording], inputs)
        except RuntimeError:  # a shape that it was not made for
            replayed = None
        result = step(*inputs)  # last, so that what it leaves behind stands
        if replayed is not None and torch.equal(result, replayed):
            shape.agreed += 1
        else:
            shape.recording, shape.agreed = shape.recording + 1, 0
        return result

    def _record(self, step: Step, inputs: Sequence[Tensor]) -> Tensor:
        """Record, where that can be done at all; the step's result."""
        try:
            with _ReadsValues() as reads, _ReadsOnHost() as host:
                step(*inputs)
            if reads.seen or host.seen:
                self._refused = True
            else:
                self._recordings.append(_recording(step, inputs))
        except Exception:  # a model may do anything; one that can't be recorded runs as it is
            self._refused = True
        return step(*inputs)


def _recording(step: Step, inputs: Sequence[Tensor]) -> Step:
    with warnings.catch_warnings():
        # That it is deprecated, and that a recording is of one shape unless proved otherwise.
        warnings.simplefilter("ignore")
        made: Any = torch.jit.trace(step, tuple(inputs), check_trace=False)
    made._torchdynamo_inline = None  # the step, which holds the model
    return made


def _replay(recording: Step, inputs: Sequence[Tensor]) -> Tensor:
    # Optimising takes as long as recording, and finds nothing.
    with torch.jit.optimized_execution(False):
        return recording(*inputs)


class _ReadsValues(TorchDispatchMode):
    """Sees operations whose outcome Python goes by, so that it may go another way with another text."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():
            # There operations arrive that others consist of, and hide them.
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        self.seen |= any(tag in func.tags for tag in tags)
        return func(*args, **(kwargs or {}))


class _ReadsOnHost(TorchFunctionMode):
    """Sees what is read off tensors without an operation."""

    seen = False
    NAMES = frozenset({"tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "item"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))


class RecordedPasses:
    """A model's passes: over one row, and over several, which a cache writes in another way."""

    def __init__(self) -> None:
        self._one_row, self._rows = Recorded(), Recorded()

    def of(self, rows: int) -> Recorded:
        """Those over so many rows."""
        return self._one_row if rows == 1 else self._rows

    @property
    def made(self) -> int:
        """How many recordings there are."""
        return self._one_row.made + self._rows.made


_known: PerTarget[RecordedPasses] = PerTarget()


def recordable(model: PreTrainedModel) -> bool:
    """Whether passes of a model may be recorded: on the CPU, of nothing but layers."""
    return (
        model.device.type == "cpu"
        and hasattr(torch.jit, "trace")
        and has_fixed_rope(model)
        and not runs_custom_python(model)
    )


def recorded_passes(model: PreTrainedModel) -> RecordedPasses | None:
    """What earlier calls have recorded of a model in the state that it is in; None where it is not `recordable`."""
    return _known.of(model, (state_of(model), shapes_of(model)), RecordedPasses) if recordable(model) else None


def recordings_of(model: PreTrainedModel) -> int:
    """How many recordings of a model's passes are kept, over all the states that it has been in."""
    return sum(passes.made for passes in _known.all_of(model).values())
