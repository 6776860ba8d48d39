"""Steps of fixed shapes, traced once and compiled by inductor layer by layer; later calls run no guards and no modules.

A trace consists of operations on tensors. The owner of a compiled step checks whatever else the step depends on.
"""

from __future__ import annotations

import gc
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from packaging.version import Version
from torch import Tensor
from torch.fx import Graph, Node

from hf_specdec.compat import inductor
from hf_specdec.compat.torch_private import fake_tensors
from hf_specdec.host.torch_threads import all_threads
from hf_specdec.prepared import code_on_disk
from hf_specdec.prepared.code_on_disk import Code
from hf_specdec.prepared.compile_progress import progress_bar
from hf_specdec.prepared.few_token_products import FewTokenProducts, called_directly, supported
from hf_specdec.prepared.joined_layers import join_linears, share_heads
from hf_specdec.prepared.lent_tensors import Lent
from hf_specdec.prepared.own_builds import in_own_folder
from hf_specdec.prepared.program import Call, Program
from hf_specdec.prepared.repeated_blocks import Segment, segments_of
from hf_specdec.prepared.step_trace import trace, value_of

Step = Callable[..., Any]
KEPT_CODES = 256

_CPU_TORCH = "2.13"  # the first version whose stable C++ interface has all that the kernels use

_codes: OrderedDict[Hashable, Code] = OrderedDict()
COMPILING = threading.RLock()  # inductor's settings are global to the process


def compile_refusal(device: torch.device) -> str | None:
    """A sentence on why nothing is compiled for a device; None if it can be tried.

    Decided by version, since only compiling would show whether the headers suffice: its error fills pages, and
    inductor's thread can crash a process in which a CUDA build of an older torch finds no GPU.
    """
    if device.type != "cpu" or Version(torch.__version__).release >= Version(_CPU_TORCH).release:
        return None
    needed, found = f"torch {_CPU_TORCH} on a CPU", f"torch {torch.__version__}"
    return f"compile=True needs {needed}, and {found} is installed: decoding goes on without."


class CompiledStep:
    """A step compiled by inductor: ahead by `compile`, or at the first call.

    Args:
        step: reads and writes its arguments and tensors of its closure, which must stay the same objects.
        device: where it runs.
        name: shown while it compiles.
        lent: lends tensors that the step must not hold, see `Lent`; other tensors of its closure are held.
    """

    def __init__(self, step: Step, device: torch.device, name: str, lent: Lent | None = None) -> None:
        self._step: Step | None = step
        self._lent = lent or Lent()
        self._name = name
        self._device = device
        self._form: Hashable = None
        self._run: Step | None = None

    def compile(self, *args: Any) -> None:
        """Compile for calls with arguments like these. C++ may still be compiling; the first call waits for it."""
        assert self._step is not None
        with COMPILING, _graphs_freed():
            self._run = _compiled(self._step, args, self._device, self._name, self._lent)
            self._form = _form(args)

    def __call__(self, *args: Any) -> Any:
        """Run the step; all calls must have arguments of the same structure (nested tuples of tensors) and shapes."""
        if self._step is not None:
            if self._form != _form(args):
                self.compile(*args)
            self._step = None
        assert self._run is not None
        return self._run(*args)


@contextmanager
def _graphs_freed() -> Iterator[None]:
    """Free the graphs made in the block: their nodes refer to each other, so this needs a garbage collection.

    Older objects are excluded from it, since checking all objects of a process would take most of a second.
    """
    if gc.get_freeze_count():  # the program has frozen objects itself, and `unfreeze` would undo that
        yield
        return
    gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        gc.unfreeze()


def _form(args: tuple[Any, ...]) -> Hashable:
    """The key of compiled code: the structure of the arguments, and each one's shape, strides and type."""
    return _structure(args), tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in _leaves(args))


def _leaves(nested: Any) -> list[Tensor]:
    """The tensors of nested tuples, in order. Weights that pass through the caches make pytree's code slow."""
    return [nested] if isinstance(nested, Tensor) else [leaf for part in nested for leaf in _leaves(part)]


def _structure(nested: Any) -> Any:
    """Nested tuples with None for each tensor."""
    return None if isinstance(nested, Tensor) else tuple(_structure(part) for part in nested)


def _filled(structure: Any, leaves: Iterator[Tensor]) -> Any:
    """Nested tuples of a structure with these tensors."""
    return next(leaves) if structure is None else tuple(_filled(part, leaves) for part in structure)


@all_threads()
def _compiled(step: Step, args: tuple[Any, ...], device: torch.device, name: str, lent: Lent) -> Step:
    graph, structure = _traced(step, args, device)
    segments = segments_of(graph)
    codes = _codes_of(segments, device, name)
    # Each use of a constant is a separate node.
    constants = {node.target: value_of(node) for node in graph.nodes if node.op == "get_attr"}
    numbers: dict[Any, int] = {target: at for at, target in enumerate(constants)}
    numbers |= {
        node: len(numbers) + at for at, node in enumerate(node for node in graph.nodes if node.op == "placeholder")
    }
    calls = []
    for segment in segments:
        sources = tuple(numbers[node.target if node.op == "get_attr" else node] for node in segment.inputs)
        calls.append(Call(codes[_what(segment, device)], sources))
        numbers |= {node: len(numbers) + at for at, node in enumerate(segment.outputs)}
    places = lent.places()
    held = [places.get(id(tensor), tensor) for tensor in constants.values()]
    program = Program(calls, held, [numbers[node] for node in _results(graph)], lent)

    def run(*args: Any) -> Any:
        return _filled(structure, iter(program(_leaves(args))))

    return run


def _results(graph: Graph) -> list[Node]:
    return cast(list[Node], graph.output_node().args[0])


def _traced(step: Step, args: tuple[Any, ...], device: torch.device) -> tuple[Graph, Any]:
    """The operations of a step, and the structure of its result."""
    given, returned = _structure(args), []

    def flat(*leaves: Tensor) -> list[Tensor]:
        result = step(*_filled(given, iter(leaves)))
        returned.append(_structure(result))
        # A copy, so that the result is no view of an argument or of a weight.
        return [tensor.clone() for tensor in _leaves(result)]

    with kernels_as_compiled(device):
        graph = trace(flat, *_leaves(args))
    share_heads(graph)
    join_linears(graph)
    return graph, returned[-1]


@contextmanager
def kernels_as_compiled(device: torch.device, *, compile: bool = True) -> Iterator[None]:
    """If `compile`, use the kernels of compiled steps in the block; others keep memory for each number of tokens."""
    if compile and device.type == "cpu" and supported():
        _start_inductor()
        with FewTokenProducts():
            yield
    elif compile and device.type == "cuda" and has_kernels_for(device):
        from hf_specdec.prepared.gpu_products import GpuProducts

        with GpuProducts():
            yield
    else:
        yield


@cache
def has_kernels_for(device: torch.device) -> bool:
    """Whether our GPU kernel supports this device: NVIDIA, compute capability 8.0 or newer."""
    made_for = torch.version.hip is None and importlib.util.find_spec("triton") is not None
    return made_for and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _start_inductor() -> None:
    """Start inductor if no code of earlier processes is found; checked once per process."""
    if not code_on_disk.any_kept():
        _inductor()


def _inductor() -> Future[None]:
    """Import inductor and compile its header in a thread, while a first step is traced and kernels are compiled."""
    with COMPILING:  # a cache alone would not keep two threads from starting it
        ready = _begun()
        if ready.done() and ready.exception() is not None:  # its compiler may have been interrupted
            _begun.cache_clear()
            ready = _begun()
        return ready


@cache
def _begun() -> Future[None]:
    with in_own_folder(torch.device("cpu")):
        inductor.find_instructions()
    pool = ThreadPoolExecutor(1)
    ready = pool.submit(_compile_any)
    pool.shutdown(wait=False)
    return ready


def settle() -> None:
    """Wait for inductor's thread: while it traces, a module called in another thread can fail."""
    if _begun.cache_info().currsize:
        wait([_inductor()])


def forget_codes() -> None:
    """Wait for inductor's thread, then drop cached code: that of an interrupted compiler would fail at every call."""
    settle()
    _codes.clear()


def _compile_any() -> None:
    graph = Graph()
    graph.output([graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("input"),))])
    _code(graph, [torch.ones(8, device="cpu")], torch.device("cpu"))


def _codes_of(segments: Sequence[Segment], device: torch.device, name: str) -> dict[Hashable, Code]:
    """Inductor's code by key; equal segments share it, also across steps and models."""
    distinct = {_what(segment, device): segment for segment in segments}
    for what in distinct:
        if what not in _codes and (code := code_on_disk.code_for(what)) is not None:
            _codes[what] = code
    missing = [what for what in distinct if what not in _codes]
    if missing and device.type == "cpu":
        with progress_bar("what all steps share", int(not _inductor().done())) as bar:
            _inductor().result()
            bar.update()
    with progress_bar(name, len(missing)) as bar:
        for what in missing:
            _codes[what] = _compile(distinct[what], device)
            bar.update()
    found = {what: _codes[what] for what in distinct}
    for what in distinct:
        _codes.move_to_end(what)
    while len(_codes) > KEPT_CODES:
        _codes.popitem(last=False)
    return found


def _what(segment: Segment, device: torch.device) -> Hashable:
    """Everything that a segment's code depends on: operations, shapes, device, threads, and C functions it calls."""
    functions = tuple(called_directly[node.target][0] for node in segment.graph.nodes if node.target in called_directly)
    return segment.key, functions, str(device), torch.get_num_threads()


def _compile(segment: Segment, device: torch.device) -> Code:
    inputs = [value_of(node) for node in segment.inputs]
    return _code(segment.graph, inputs, device, partial(code_on_disk.keep, _what(segment, device)))


def _code(
    graph: Graph, inputs: Sequence[Tensor], device: torch.device, keep: Callable[[Path], None] = lambda library: None
) -> Code:
    """Compile a graph for inputs like these; `keep` is called with its library once that exists."""
    codes: list[Any] = []

    def finished(library: Path) -> None:
        # Inductor's code adds constants to the inputs in Python.
        if not codes[0].constants:
            keep(library)

    kernels = {node.target: called_directly[node.target] for node in graph.nodes if node.target in called_directly}
    options = {**inductor.OPTIONS, **inductor.calling(kernels)} if device.type == "cpu" else {}
    with in_own_folder(device), inductor.in_background(finished):
        codes.append(inductor.code_of(graph, _fake(inputs), options))
    run: Code = codes[0].current_callable
    return run


def _fake(tensors: Sequence[Tensor]) -> list[Tensor]:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor's cache on disk requires a shape environment, though there are no symbolic shapes.
    with fake_tensors(shape_env=ShapeEnv()):
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
