"""Passes on a CPU without Python overhead: traced as the model runs, replayed by TorchScript's interpreter.

For a small model, calling its modules takes longer than the computation. A recording replays the model's own
operations bit by bit; making one needs no compiler and takes as long as about ten passes. Weights and caches are
inputs of a recording, so it holds no copy of them and serves texts of any length. Layers that are alike share a trace:
torch's graph takes about 3 MB for each. Models whose passes do more in Python than call operations are not recorded.

In float32 on two cores of an AMD Zen 4, a plain step of a model of 135M takes 37 ms from recordings and 48 without, a
round of four drafts 74 and 97. Of the embedded pair these are 3.0 and 6.4 ms, and 6.1 and 12.6.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
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
PYTHON_SHARE = 0.07  # of a pass, at least: recording takes as long as ten passes and saves what Python takes
CALLS_PER_LAYER = 200  # Python takes as long for a layer as for calling an operation on a few numbers so often
AGREEING_TRIALS = 2  # passes of a shape in which recording and model have to agree in every bit
MAX_RECORDINGS = 4  # recordings of a model in one state; shapes that none of them serves run eagerly

Step = Callable[..., Tensor]


@dataclass
class _Shape:
    """A shape's passes, the seconds of the eager ones, the recording that it tries or uses, the trials that agreed."""

    passes: int = 0
    seconds: list[float] = field(default_factory=list)
    recording: int = 0
    agreed: int = 0


class RecordedStep:
    """A step that runs eagerly at first and later from recordings, each of which was compared with the eager step.

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
        """How many recordings there are."""
        return len(self._recordings)

    def run(self, step: Step, inputs: Sequence[Tensor], span: int, model: PreTrainedModel | None = None) -> Tensor:
        """The result of `step(*inputs)`, with its changes to the inputs.

        Args:
            step: the same function in every call, apart from closures that hold nothing that changes except inputs.
            inputs: all tensors that may differ between calls; the shape of the first one tells shapes apart.
            span: slots that attention looks at; once it has doubled, a shape is compared anew.
            model: if given, what the step runs; it also takes another one, as `step(*inputs, model=…)`.
        """
        shape = self._shapes.setdefault((*inputs[0].shape, span.bit_length()), _Shape())
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
            slow = min(shape.seconds, default=0.0) > self._slowest
            if slow or len(self._recordings) == MAX_RECORDINGS or self._refused:
                return step(*inputs)
            return self._record(step, inputs, model)
        finally:
            self._trying.release()

    def _try(self, step: Step, inputs: Sequence[Tensor], shape: _Shape) -> Tensor:
        """Run a recording and the step and compare; if they differ, the shape goes on to the next recording."""
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
        """Record the step if possible; returns its result."""
        recording = None
        try:
            with _ReadsValues() as reads, _ReadsOnHost() as host:
                result = step(*inputs)
            if not reads.seen and not host.seen:
                recording = _shared(step, inputs, model, result) or traced(step, inputs)
        except Exception:  # a model's code may do anything; one that can't be traced runs eagerly
            pass
        if recording is None:
            self._refused = True
        else:
            self._recordings.append(recording)
        return step(*inputs)


def _shared(step: Step, inputs: Sequence[Tensor], model: PreTrainedModel | None, result: Tensor) -> Trace | None:
    """The trace with shared layers; None where it gives another result, since layers know their place in the model."""
    if model is None:
        return None
    try:
        made = trace_with_shared_layers(step, model, inputs)
    except Exception:  # it asks more of a model than a trace of the whole pass, which may succeed
        return None
    return made if made is not None and torch.equal(replay(made, inputs), result) else None


class _ReadsValues(TorchDispatchMode):
    """Detects operations that return data to Python, which may then behave differently for another text."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():
            # Composite operations are dispatched whole there and hide their parts.
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        self.seen |= depends_on_values(func, args)
        return func(*args, **(kwargs or {}))


def depends_on_values(func: Any, args: Any) -> bool:
    """Whether an operation returns a number to Python, or a tensor whose shape depends on the values of another."""
    if func is torch.ops.aten.index.Tensor:
        # It has the tag for the sake of masks; integers, such as positions, give a shape that is known.
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
        layers: of the model.
    """

    def __init__(self, layers: int) -> None:
        slowest = slowest_recorded(layers)
        self._one_row, self._rows = RecordedStep(slowest), RecordedStep(slowest)

    def of(self, rows: int) -> RecordedStep:
        """The passes over `rows` rows."""
        return self._one_row if rows == 1 else self._rows

    @property
    def made(self) -> int:
        """How many recordings there are."""
        return self._one_row.made + self._rows.made


def slowest_recorded(layers: int) -> float:
    """Seconds of the slowest pass of which Python takes `PYTHON_SHARE` on this machine.

    What surrounds the layers takes about as long as two of them.
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


def recordable(model: PreTrainedModel) -> bool:
    """Whether passes of a model can be recorded: on the CPU, by models that run layers only."""
    return model.device.type == "cpu" and can_trace() and has_fixed_rope(model) and not runs_custom_python(model)


def recorded_passes(
    model: PreTrainedModel, kernels: Kernels = onednn_linears, layers_read: Sequence[int] = ()
) -> RecordedPasses | None:
    """The recordings that calls share while the model's state is the same; None if it is not `recordable`.

    Args:
        kernels, layers_read: what passes run in, and the layers whose hidden states they return. Others have
            recordings of their own.
    """
    if not recordable(model):
        return None
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    key = state_of(model), forms_of(model), kernels, tuple(layers_read)
    return _known.of(model, key, partial(RecordedPasses, layers))


def recordings_of(model: PreTrainedModel) -> int:
    """How many recordings of a model's passes are kept, over all the states that it has been in."""
    return sum(passes.made for passes in _known.all_of(model).values())
