"""`Program`: a compiled step as its segments' code, called one after another.

Python takes as long to call a layer's code as a small layer takes to compute. Where all the code lies on disk and torch
has what it takes, C++ calls it instead, with the same tensors. This saves a quarter of a plain step of the embedded
target on an AMD processor, and 5 to 10% of one at 135M in int8. The first call is Python's, and waits for the compiler.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor

from hf_specdec.compat.torch_private import conversions
from hf_specdec.prepared import code_on_disk, own_code
from hf_specdec.prepared.code_on_disk import Code
from hf_specdec.prepared.lent_tensors import Lent, Place

Run = Callable[[list[Tensor]], Sequence[Tensor]]

_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@dataclass(frozen=True)
class Call:
    """A segment's code with what it reads.

    Args:
        what: what the code was compiled for, see `code_on_disk`.
        code: calls it.
        sources: of each input the number of its value; see `Program`.
        outputs: how many values it returns.
    """

    what: Hashable
    code: Code
    sources: tuple[int, ...]
    outputs: int


class Program:
    """The calls of a step in order. Values are numbered: constants, then what a call is given, then all outputs.

    Args:
        calls: the segments' code.
        constants: tensors of the step itself, and the places of those that are lent to it, such as weights.
        results: the numbers of the values to return.
        lent: lends them.
    """

    def __init__(
        self, calls: Sequence[Call], constants: Sequence[Tensor | Place], results: Sequence[int], lent: Lent
    ) -> None:
        self._calls, self._constants, self._results = tuple(calls), tuple(constants), tuple(results)
        self._lent, self._places = lent, [place for place in constants if not isinstance(place, Tensor)]
        self._waited = False
        self._cpp: Callable[[Sequence[Tensor]], Run] | None = None
        self._run: Run | None = None

    def __call__(self, given: list[Tensor]) -> Sequence[Tensor]:
        """Run the step. `given`: its inputs, one tensor for each. Returns its results."""
        if self._run is not None:
            return self._run(given)
        taken = iter(self._lent.take(self._places, self._let_go))
        constants = [held if isinstance(held, Tensor) else next(taken) for held in self._constants]
        if self._waited:
            self._run = self._on(constants)
            return self._run(given)
        results = self._by_python(constants, given)
        self._cpp, self._waited = _by_cpp(self._calls, self._results), True
        self._run = self._on(constants)
        return results

    def _on(self, constants: Sequence[Tensor]) -> Run:
        return partial(self._by_python, constants) if self._cpp is None else self._cpp(constants)

    def _let_go(self) -> None:
        self._run = None

    def _by_python(self, constants: Sequence[Tensor], given: list[Tensor]) -> list[Tensor]:
        values = [*constants, *given]
        for call in self._calls:
            values += call.code([values[source] for source in call.sources])
        return [values[at] for at in self._results]


class _Segment(ctypes.Structure):
    """As program.cpp has it."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("sources", ctypes.POINTER(ctypes.c_int64)),
    )


class _Program(ctypes.Structure):
    """As program.cpp has it."""

    _fields_ = (
        ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_int64),
        ("constants", ctypes.POINTER(ctypes.c_void_p)),
        ("constant_count", ctypes.c_int64),
        ("results", ctypes.POINTER(ctypes.c_int64)),
        ("result_count", ctypes.c_int64),
    )


def _by_cpp(calls: Sequence[Call], results: Sequence[int]) -> Callable[[Sequence[Tensor]], Run] | None:
    """The calls by C++, given the constants; None where torch or the libraries lack what it takes."""
    between = conversions()
    functions = {what: _function_for(what) for what in {call.what for call in calls}}
    if between is None or None in functions.values():
        return None
    handles_of, tensors_of = between
    runner = _runner()
    segments = (_Segment * len(calls))()
    for segment, call in zip(segments, calls, strict=True):
        segment.run, segment.inputs, segment.outputs = functions[call.what], len(call.sources), call.outputs
        segment.sources = (ctypes.c_int64 * len(call.sources))(*call.sources)
    numbers = (ctypes.c_int64 * len(results))(*results)

    def on(constants: Sequence[Tensor]) -> Run:
        held = (ctypes.c_void_p * len(constants))(*(_pointer_in(one, None) for one in handles_of(list(constants))))
        program = _Program(segments, len(calls), held, len(constants), numbers, len(results))

        def run(given: list[Tensor]) -> Sequence[Tensor]:
            found: Sequence[Tensor] = tensors_of(runner.hf_specdec_run(ctypes.byref(program), handles_of(given)))
            return found

        weakref.finalize(run, runner.hf_specdec_release, held, len(constants))
        return run

    return on


def _function_for(what: Hashable) -> int | None:
    library = code_on_disk.library_for(what)
    return None if library is None else code_on_disk.function_in(library)


@cache
def _runner() -> Any:
    """program.cpp, which calls code that expects Python's lock to be held."""
    library = ctypes.PyDLL(str(own_code.library_of((own_code.KERNELS / "program.cpp").read_text())))
    library.hf_specdec_run.restype = ctypes.py_object
    library.hf_specdec_run.argtypes = (ctypes.c_void_p, ctypes.py_object)
    library.hf_specdec_release.restype = None
    library.hf_specdec_release.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return library
