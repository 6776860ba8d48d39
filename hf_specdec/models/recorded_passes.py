"""Passes on a CPU without Python overhead: traced as the model runs, replayed by TorchScript's interpreter.

For a small model, calling its modules takes longer than the computation. A recording replays the model's own
operations, bit-identically; making one needs no compiler and takes about ten passes' time. Weights and caches are
inputs of a recording, so it holds no copy of them and serves texts of any length. Equal layers share a trace, since
torch's graph takes about 3 MB for each. Models whose passes do more in Python than call operations are not recorded.

In float32 on two cores of an AMD Zen 4, a plain step of a 135M model takes 37 ms with recordings and 48 without, a
round of four drafts 74 and 97. For the embedded pair it is 3.0 and 6.4 ms, and 6.1 and 12.6.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.compat.torch_private import TorchDispatchMode, can_trace
from hf_specdec.host.torch_state import FunctionMode
from hf_specdec.models.fingerprint import forms_of, runs_custom_python, state_of
from hf_specdec.models.jit_traces import Trace, replay, traced
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.per_target import PerTarget
from hf_specdec.models.rope_stages import has_fixed_rope
from hf_specdec.models.shared_layers import trace_with_shared_layers

EAGER_PASSES = 8  # passes of a shape before it is recorded
PYTHON_SHARE = 0.07  # Python's smallest share of a pass: recording takes ten passes' time and saves only that share
CALLS_PER_LAYER = 200  # calls of an operation on a few numbers that take as long as Python does for a layer
AGREEING_TRIALS = 2  # passes of a shape in which recording and model must agree in every bit
MAX_RECORDINGS = 4  # recordings of a model in one state; shapes that none of them serves run eagerly

Step = Callable[..., Tensor]


@dataclass
class _Shape:
    """A shape's passes, the times of eager ones, the recording that it tries or uses, and the agreeing trials."""

    passes: int = 0
    seconds: list[float] = field(default_factory=list)
    recording: int = 0
    agreed: int = 0


class RecordedStep:
    """A step that runs eagerly at first and later from recordings, each verified against the eager step.

    Most shapes share one recording. Calls from several threads don't wait for each other: while one tries a
    recording, the others run eagerly.

    Args:
        slowest: in seconds; passes that take longer are not recorded.
    """

    def __init__(self, slowest: float = math.inf) -> None:
        self._slowest = slowest
        self._recordings: list[Trace] = []
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._refused = False
        self._trying = threading.Lock()

    @property
    def made(self) -> int:
        """The number of recordings."""
        return len(self._recordings)

    @property
    def trials(self) -> int:
        """The number of passes that were recorded, or compared with a recording."""
        return self.made + sum(shape.agreed for shape in list(self._shapes.values()))

    def is_settled(self, inputs: Sequence[Tensor], span: int) -> bool:
        """Whether the next pass of this shape takes as long as later ones; arguments as in `run`."""
        shape = self._shape(inputs, span)
        return shape.agreed >= AGREEING_TRIALS or self._stays_eager(shape)

    def _shape(self, inputs: Sequence[Tensor], span: int) -> _Shape:
        return self._shapes.setdefault((*inputs[0].shape, span.bit_length()), _Shape())

    def _stays_eager(self, shape: _Shape) -> bool:
        tried_all = shape.recording >= len(self._recordings)
        slow = min(shape.seconds, default=0.0) > self._slowest
        return tried_all and (slow or len(self._recordings) == MAX_RECORDINGS or self._refused)

    def run(self, step: Step, inputs: Sequence[Tensor], span: int, model: PreTrainedModel | None = None) -> Tensor:
        """The result of `step(*inputs)`, with its changes to the inputs.

        Args:
            step: the same function in every call, apart from closures that hold nothing that changes except inputs.
            inputs: all tensors that may differ between calls; the shape of the first one tells shapes apart.
            span: slots that attention reads; when it has doubled, a shape is compared again.
            model: the model that the step runs, if it also accepts another one as `step(*inputs, model=…)`.
        """
        shape = self._shape(inputs, span)
        if shape.agreed >= AGREEING_TRIALS:
            return replay(self._recordings[shape.recording], inputs)
        if not self._trying.acquire(blocking=False):
            return step(*inputs)
        try:
            shape.passes += 1
            if shape.recording < len(self._recordings):
                return self._try(step, inputs, shape)
            if shape.passes < EAGER_PASSES:
                start = perf_counter()
                result = step(*inputs)
                shape.seconds.append(perf_counter() - start)
                return result
            if self._stays_eager(shape):
                return step(*inputs)
            return self._record(step, inputs, model)
        finally:
            self._trying.release()

    def _try(self, step: Step, inputs: Sequence[Tensor], shape: _Shape) -> Tensor:
        """Run a recording and the step and compare; if they differ, try the next recording in the next pass."""
        try:
            replayed = replay(self._recordings[shape.recording], inputs)
        except RuntimeError:  # made for other shapes
            replayed = None
        result = step(*inputs)  # last, so that its writes to the cache stay
        if replayed is not None and torch.equal(result, replayed):
            shape.agreed += 1
        else:
            shape.recording, shape.agreed = shape.recording + 1, 0
        return result

    def _record(self, step: Step, inputs: Sequence[Tensor], model: PreTrainedModel | None) -> Tensor:
        """Record the step if possible; return its result."""
        recording = None
        try:
            with _ReadsValues() as reads, _ReadsOnHost() as host:
                result = step(*inputs)
            if not reads.seen and not host.seen:
                recording = _shared(step, inputs, model, result) or traced(step, inputs)
        except Exception:  # a model's code may do anything; one that cannot be traced runs eagerly
            pass
        if recording is None:
            self._refused = True
        else:
            self._recordings.append(recording)
        return step(*inputs)


def _shared(step: Step, inputs: Sequence[Tensor], model: PreTrainedModel | None, result: Tensor) -> Trace | None:
    """The trace with shared layers; None if its result differs, since layers may depend on their place."""
    if model is None:
        return None
    try:
        made = trace_with_shared_layers(step, model, inputs)
    except Exception:  # the trace of the whole pass requires less of a model and may still succeed
        return None
    return made if made is not None and torch.equal(replay(made, inputs), result) else None


class _ReadsValues(TorchDispatchMode):
    """Detects operations that return data to Python, which may then behave differently for another text."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():
            # Composite operations would hide their parts there.
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        self.seen |= depends_on_values(func, args)
        return func(*args, **(kwargs or {}))


def depends_on_values(func: Any, args: Any) -> bool:
    """Whether an operation returns a number to Python, or a tensor whose shape depends on another's values."""
    if func is torch.ops.aten.index.Tensor:
        # It has the tag because of masks; with integer indices, such as positions, the shape is known.
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return any(tag in func.tags for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


class _ReadsOnHost(FunctionMode):
    """Detects tensors read by Python without an operation."""

    seen = False
    NAMES = frozenset({"tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "item"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))


class RecordedPasses:
    """A model's recorded passes over one row, and over several, which write to the cache differently.

    Args:
        layers: the model's number of layers.
    """

    def __init__(self, layers: int) -> None:
        slowest = slowest_recorded(layers)
        self._one_row, self._rows = RecordedStep(slowest), RecordedStep(slowest)

    def of(self, rows: int) -> RecordedStep:
        """The recorded step for passes over `rows` rows."""
        return self._one_row if rows == 1 else self._rows

    @property
    def made(self) -> int:
        """The number of recordings."""
        return self._one_row.made + self._rows.made

    @property
    def trials(self) -> int:
        """The number of passes that were recorded, or compared with a recording."""
        return self._one_row.trials + self._rows.trials


def slowest_recorded(layers: int) -> float:
    """Seconds of the slowest pass in which Python's share is `PYTHON_SHARE` on this machine.

    The code around the layers takes about as long as two of them.
    """
    return (layers + 2) * CALLS_PER_LAYER * _seconds_per_call() / PYTHON_SHARE


@cache
def _seconds_per_call() -> float:
    numbers, times = torch.ones(8), []
    for _ in range(5):
        start = perf_counter()
        for _ in range(100):
            torch.neg(numbers)
        times.append(perf_counter() - start)
    return min(times) / 100


_known: PerTarget[RecordedPasses] = PerTarget()
_wanted: ContextVar[bool] = ContextVar("recordings wanted", default=True)


@contextmanager
def without_recordings() -> Iterator[None]:
    """Run passes eagerly within the block, as with a torch version that cannot record them."""
    before = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(before)


def recordable(model: PreTrainedModel) -> bool:
    """Whether passes of a model can be recorded: it is on the CPU and runs layers only."""
    if model.device.type != "cpu" or not _wanted.get() or not can_trace():
        return False
    return has_fixed_rope(model) and not runs_custom_python(model)


def recorded_passes(
    model: PreTrainedModel, kernels: Kernels = onednn_linears, layers_read: Sequence[int] = ()
) -> RecordedPasses | None:
    """The recordings that calls share while the model's state is the same; None if it is not `recordable`.

    Args:
        kernels, layers_read: the context manager of passes, and the layers whose hidden states they return; each
            combination has its own recordings.
    """
    if not recordable(model):
        return None
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    key = state_of(model), forms_of(model), kernels, tuple(layers_read)
    return _known.of(model, key, partial(RecordedPasses, layers))


def trials_of(model: PreTrainedModel) -> int:
    """The number of a model's passes that were recorded, or compared with a recording, over all its states."""
    return sum(passes.trials for passes in _known.all_of(model).values())
