"""Traces of a pass in which equal layers are one function, traced once and called for each layer.

A trace takes about 3 MB for every layer, and tracing is slow. A pass therefore runs on a twin of the model, whose
layers are stand-ins: the first of each kind is traced, with everything that it reads as an input, and the others call
that trace. For a 135M model (30 layers) the first call takes 3.3 instead of 4.4 s on two cores of an AMD Zen 4, and the
process 1,210 instead of 1,340 MB.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.compat.torch_private import children_of, pytree, replace_child
from hf_specdec.models.cache_rollback import self_attention
from hf_specdec.models.fingerprint import kind_of
from hf_specdec.models.jit_traces import Trace, replay, traced
from hf_specdec.models.static_cache import RowsCache, Slots
from hf_specdec.models.stored_tensors import tensors_of


class UnshareableError(Exception):
    """A layer reads or changes more than its arguments, its weights and its part of the cache."""


def trace_with_shared_layers(
    step: Callable[..., Tensor], model: PreTrainedModel, inputs: Sequence[Tensor]
) -> Trace | None:
    """Trace `step(*inputs, model=model)` with a function for each kind of layer; None if no layers can share one.

    Args:
        step: runs the given model over a `RowsCache`; reads no other tensors than `inputs`.
        inputs: all tensors that the pass reads, including weights and cache.

    Raises:
        UnshareableError: a layer is not a function of its inputs. Tracing a model may raise further errors.
    """
    name, layers = _layers_of(model)
    kinds = [kind_of(layer) for layer in layers]
    if len(set(kinds)) == len(kinds):
        return None
    functions: dict[Hashable, _Function] = {}
    stand_ins = [
        _StandIn(layer, at, functions, kind) for at, (layer, kind) in enumerate(zip(layers, kinds, strict=True))
    ]
    twin = _with_module(model, name.split("."), torch.nn.ModuleList(stand_ins))
    step(*inputs, model=twin)  # traces the layers
    return traced(
        lambda *inputs: step(*inputs, model=twin), inputs, [function.trace for function in functions.values()]
    )


def _layers_of(model: PreTrainedModel) -> tuple[str, Sequence[torch.nn.Module]]:
    """The name of the decoder's list of layers, and the layers; empty if no list has the model's depth."""
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if model.config.is_encoder_decoder and "decoder" not in name.split("."):
            continue
        if isinstance(module, torch.nn.ModuleList) and len(module) == depth:
            return name, list(module)
    return "", []


def _with_module(model: torch.nn.Module, path: Sequence[str], new: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model with one module replaced; it shares everything else."""
    first, *rest = path
    twin = copy.copy(model)
    inner = _with_module(children_of(model)[first], rest, new) if rest else new  # type: ignore[arg-type]
    replace_child(twin, first, inner)
    return twin


@dataclass(frozen=True)
class _Function:
    """The function that layers of a kind compute.

    Args:
        form: the form of their calls: everything except tensors.
        trace: a function of tensors, which returns the result's tensors.
        result: the result's structure.
    """

    form: tuple[Any, ...]
    trace: Trace
    result: pytree.TreeSpec


class _StandIn(torch.nn.Module):
    """Replaces a layer: calls the function of its kind, which the first one traces.

    Args:
        layer: the replaced layer.
        place: the layer's index, in the model and in the cache.
        functions: the functions traced so far, by kind.
        kind: the layer's kind.
    """

    def __init__(
        self, layer: torch.nn.Module, place: int, functions: dict[Hashable, _Function], kind: Hashable
    ) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not registered as a submodule, which would give it a parent
        self.place, self.functions, self.kind = place, functions, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's result."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        caches = map(self_attention, leaves)
        cache = next((leaf for leaf in caches if isinstance(leaf, RowsCache)), None)
        if cache is None:
            raise UnshareableError("it is not given the cache")
        slots = cache.slots
        span = slots.span if isinstance(slots.span, Tensor) else torch.tensor(slots.span)
        stored = cache.tensors_of_layer(self.place)
        inputs = [span, slots.written, slots.rows, *stored, *tensors_of(self.layer), *given]
        form = (
            structure,
            tuple(None if isinstance(leaf, Tensor) else (self_attention(leaf),) for leaf in leaves),
            _twice(inputs),
        )
        if self.kind not in self.functions:
            self.functions[self.kind] = self._function(leaves, structure, slots, inputs, form)
        function = self.functions[self.kind]
        if function.form != form:
            raise UnshareableError("layers of its kind are called in several ways")
        return pytree.tree_unflatten(replay(function.trace, inputs), function.result)

    def _function(
        self, leaves: Sequence[Any], structure: pytree.TreeSpec, slots: Slots, inputs: Sequence[Tensor], form: Any
    ) -> _Function:
        """The layer as a function of `inputs`, the last of which are the tensors among `leaves`."""
        span, returned = slots.span, []
        count = sum(isinstance(leaf, Tensor) for leaf in leaves)

        def layer(span: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            slots.span = span  # type: ignore[assignment]
            given = iter(inputs[len(inputs) - count :])
            filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(filled, structure)
            results, found = pytree.tree_flatten(self.layer(*args, **kwargs))
            returned.append(found)
            return tuple(results)

        try:
            trace = traced(layer, inputs)
        finally:
            slots.span = span
        if trace is None or _holds_tensors(trace):
            raise UnshareableError("it reads what it is not given")
        return _Function(form, trace, returned[-1])


def _twice(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor, its first index: the same object may be given as several inputs."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), at) for at, tensor in enumerate(tensors))


def _holds_tensors(trace: Trace) -> bool:
    """Whether a trace holds tensors, which would be those of the first layer."""
    graph: Any = trace.function.graph  # Any, since its annotations lack its methods
    return any(isinstance(node.output().toIValue(), Tensor) for node in graph.findAllNodes("prim::Constant"))
