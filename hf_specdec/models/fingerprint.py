"""What code made from a model depends on beside its weights' numbers: calls that find it unchanged share such code."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable
from itertools import count
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# By these names PEFT's layers say which adapter is at work. Other private attributes are `generate`'s book-keeping.
_ADAPTERS = frozenset({"_active_adapter", "_disable_adapters"})
# What every module has; hooks and training are looked at by themselves.
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type)
_numbers = count()
_serials: dict[int, tuple[weakref.ref[Any], int]] = {}


def state_of(model: PreTrainedModel) -> Hashable:
    """A model's modules with their classes, methods, hooks and attributes, its attention, adapters, autocast.

    Objects among the attributes (a config) are told apart, but not looked into. Nothing in it keeps a model alive.
    """
    config = model.config.get_text_config(decoder=True)
    attention = config._attn_implementation
    cast = torch.is_autocast_enabled(model.device.type) and torch.get_autocast_dtype(model.device.type)
    functions = {
        name: tuple(_serial(value) for value in vars(sys.modules[name]).values() if isinstance(value, FunctionType))
        for name in {type(module).__module__ for module in model.modules()}
        if name in sys.modules and not name.startswith("torch.")
    }
    return (
        str(model.device),
        cast,
        (attention, _plain(ALL_ATTENTION_FUNCTIONS.get(attention))),
        tuple(_module_state(module) for module in model.modules()),
        tuple(sorted(functions.items())),
    )


def weights_of(model: PreTrainedModel) -> Hashable:
    """A model's very weights and buffers: which tensors they are, and where they stand."""
    # Those of a tensor class of their own (quantized ones) may have no address to ask for.
    plain = (torch.nn.Parameter, torch.Tensor)
    return tuple(
        (_serial(t), t.data_ptr() if type(t) in plain else 0, t.dtype)
        for tensors in (model.parameters(), model.buffers())
        for t in tensors
    )


def shapes_of(model: PreTrainedModel) -> Hashable:
    """Shapes and dtypes of weights and buffers."""
    return tuple((tuple(t.shape), t.dtype) for tensors in (model.parameters(), model.buffers()) for t in tensors)


def runs_custom_python(model: PreTrainedModel) -> bool:
    """Whether calling a model runs more than operations of transformers' and torch's own layers.

    Modules of other libraries do (adapters among them), hooks, replaced or compiled methods, dropout, autocast, torch's
    function modes, weights of a tensor class of their own.
    """
    return (
        torch.is_autocast_enabled(model.device.type)
        or torch.nn.modules.module._has_any_global_hook()
        or torch._C._len_torch_function_stack() > 0
        or any(type(weight) is not torch.nn.Parameter for weight in model.parameters())
        or any(map(_has_python, model.modules()))
    )


def has_fixed_rope(model: PreTrainedModel) -> bool:
    """Whether rotary frequencies are the same at every length; otherwise they are chosen by reading numbers."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return not any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def _has_python(module: torch.nn.Module) -> bool:
    return bool(
        module.training
        or not type(module).__module__.startswith(("torch.nn.", "transformers."))
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._compiled_call_impl is not None
        or "forward" in vars(module)
    )


def _module_state(module: torch.nn.Module) -> Hashable:
    attributes = [
        (name, _plain(value))
        for name, value in vars(module).items()
        if name in _ADAPTERS or not (name.startswith("_") or name in _MODULE_ATTRIBUTES)
    ]
    hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
    kind = type(module)
    return (
        _serial(module),
        kind,
        _serial(kind.forward),
        hooks,
        module.training,
        tuple(attributes),
    )


def _plain(value: Any) -> Hashable:
    """A value itself where it is plain, its parts where it is a collection, otherwise which object it is."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_plain, value))
    if isinstance(value, dict):
        return tuple((key, _plain(part)) for key, part in value.items())
    return _serial(value)


def _serial(thing: object) -> int:
    """A number for each object, never given to another one; negative where an object can't be watched."""
    key = id(thing)
    known = _serials.get(key)
    if known is not None and known[0]() is thing:
        return known[1]
    try:
        # What has gone makes room for another object of the same address.
        watch = weakref.ref(thing, lambda _: _serials.pop(key, None))
    except TypeError:
        return -key
    _serials[key] = watch, next(_numbers)
    return _serials[key][1]
