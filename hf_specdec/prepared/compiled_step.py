"""`torch.compile` for steps of fixed shapes: no guards, and at later calls no way through Python but one list."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from hf_specdec.prepared.few_token_products import OPTIONS, as_loops
from hf_specdec.prepared.inductor_pointers import pieces_as_pointers

Step = Callable[..., Any]
Graph = Callable[[list[Any]], Sequence[Any]]  # empties the list that it is given


class Compiled:
    """A step as `torch.compile` makes it at the first call; where that fails, as it is, and a warning says so.

    Guards on every weight of a model cost as much as a small draft's pass, each round, and fetching the weights from
    the model's modules a tenth of the target's. So neither is done twice: the first call notes what the graph was
    given and which of it were the call's arguments. Whoever keeps the step checks what it depends on, and calls it
    with arguments of one structure and shape, all of them tensors of their own.

    Args:
        step: reads and writes the tensors of its closure, which have to stay the same objects, and its arguments.
        device: where it runs.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        self._plain = step
        self._loops = device.type == "cpu"
        self._step = as_loops(step) if self._loops else step
        self._options = {"cpp_wrapper": True, **OPTIONS} if self._loops else {}
        self._run: Step | None = None
        self._graph: Graph | None = None
        self._given: list[Any] = []
        self._returned: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        """Run the step."""
        if self._run is not None:
            return self._run(*args)
        try:
            compiled = _compiled(self._step, self._backend)
            result = compiled(*args)
        except (RuntimeError, TypeError) as error:
            reason = f"compile=True: decoding goes on uncompiled, since torch.compile failed: {error}"
            warnings.warn(reason, stacklevel=2)
            self._run = self._plain
            return self._plain(*args)
        self._run = self._direct(args, result) or compiled
        return result

    def _backend(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Inductor; what its code is given and returns is noted."""
        # Importing it takes seconds.
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def inner(*args: Any, **kwargs: Any) -> Any:
            code: Any = compile_fx_inner(*args, **kwargs)
            code.current_callable = self._noting(code.current_callable)
            return code

        # That cache would give back code that has not come by here; inductor's own keeps what takes long.
        with config.patch(enable_autograd_cache=False), pieces_as_pointers() if self._loops else nullcontext():
            return cast(Callable[..., Any], compile_fx(graph, inputs, inner, config_patches=self._options))

    def _noting(self, graph: Graph) -> Graph:
        """The same code, which at its first call notes what it is given and returns."""

        def noting(given: list[Any]) -> Sequence[Any]:
            inputs = list(given)
            returned = graph(given)
            if self._run is None:
                self._graph, self._given, self._returned = graph, inputs, list(returned)
            return returned

        return noting

    def _direct(self, args: tuple[Any, ...], result: Any) -> Step | None:
        """Inductor's code with the arguments of a call among what the first one gave it.

        None where something of the result is not what that code returned.
        """
        graph, given, returned = self._graph, self._given, [id(value) for value in self._returned]
        self._given, self._returned = [], []
        leaves, (outcome, structure) = pytree.tree_leaves(args), pytree.tree_flatten(result)
        if graph is None or not all(leaf is None or id(leaf) in returned for leaf in outcome):
            return None
        places = [None if leaf is None else returned.index(id(leaf)) for leaf in outcome]
        arguments = [
            (place, at) for place, value in enumerate(given) for at, leaf in enumerate(leaves) if leaf is value
        ]
        for place, _ in arguments:
            given[place] = None

        def run(*args: Any) -> Any:
            leaves, inputs = pytree.tree_leaves(args), list(given)
            for place, at in arguments:
                inputs[place] = leaves[at]
            outputs = graph(inputs)
            return pytree.tree_unflatten([None if place is None else outputs[place] for place in places], structure)

        return run


def _compiled(step: Step, backend: Callable[..., Graph]) -> Step:
    options = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    # Each step counts its graphs by itself; torch's stubs don't know the argument yet.
    compiled: Step = torch.compile(  # type: ignore[call-overload]
        step, backend=backend, fullgraph=True, dynamic=False, options=options, isolate_recompiles=True
    )
    return compiled
