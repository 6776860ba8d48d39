"""The state that recordings and compiled code of a model depend on, besides the weights' values."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterable
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdec.compat.torch_private import (
    FUNCTION_MODES,
    any_global_hook,
    children_of,
    forward_hooks,
    has_compiled_call,
    held_tensors,
)
from hf_specdec.compat.transformers_private import attention_name
from hf_specdec.models.stored_tensors import PLAIN, stored_tensors

# The active adapters of PEFT's layers. Other private attributes are bookkeeping of `generate`.
_ADAPTERS = frozenset({"_active_adapter", "_disable_adapters"})
# Attributes of every module; hooks and `training` are part of the state separately.
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type)
_numbers = count()
_serials: dict[int, tuple[weakref.ref[Any], int]] = {}


def state_of(model: PreTrainedModel) -> Hashable:
    """Everything except weights and texts that determines what a pass computes.

    It covers the modules with their classes, methods, hooks and attributes, the values of their configurations,
    attention, adapters and autocast. Other objects among the attributes count by identity. It keeps no model alive.
    """
    modules = list(model.modules())
    attention = attention_name(model.config.get_text_config(decoder=True))
    cast = torch.is_autocast_enabled(model.device.type) and torch.get_autocast_dtype(model.device.type)
    functions = {
        name: tuple(_serial(value) for value in vars(sys.modules[name]).values() if isinstance(value, FunctionType))
        for name in {type(module).__module__ for module in modules}
        if name in sys.modules and not name.startswith("torch.")
    }
    configs = {id(c): c for module in modules if isinstance(c := vars(module).get("config"), PreTrainedConfig)}
    return (
        str(model.device),
        cast,
        (attention, _value(ALL_ATTENTION_FUNCTIONS.get(attention))),
        tuple(map(_module_state, modules)),
        tuple(map(_config_state, configs.values())),
        tuple(sorted(functions.items())),
    )


def weights_of(model: PreTrainedModel) -> Hashable:
    """The identity and address of each weight and buffer, or of the tensors that make up a quantized one."""
    return tuple((_serial(t), _address(t)) for tensors in (model.parameters(), model.buffers()) for t in tensors)


def _address(weight: Tensor) -> Hashable:
    # Tensor subclasses have no address, and some don't name their parts either.
    return tuple((_serial(part), part.data_ptr()) for part in stored_tensors(weight) if _is_strided(part))


def forms_of(*models: torch.nn.Module) -> Hashable:
    """The form of all weights and buffers: everything that a pass depends on except their numbers and addresses.

    It covers shapes, strides and types, by module and name, and which weights are the same tensor, also across models.
    """
    known: dict[int, int] = {}

    def form(tensor: Tensor | None) -> Hashable:
        return None if tensor is None else (known.setdefault(id(tensor), len(known)), _form(tensor))

    return tuple(
        tuple((name, form(tensor)) for name, tensor in held.items())
        for model in models
        for module in model.modules()
        for held in held_tensors(module)
    )


def _form(tensor: Tensor) -> Hashable:
    """Shape, strides and type of a tensor, or of each tensor that makes up a quantized one."""
    kind = type(tensor)
    if kind in PLAIN:
        return tuple(tensor.shape), tensor.stride() if _is_strided(tensor) else tensor.layout, tensor.dtype
    if not hasattr(tensor, "__tensor_flatten__"):
        return kind, tuple(tensor.shape), tensor.dtype, _value(vars(tensor))
    names, context = tensor.__tensor_flatten__()
    parts = (getattr(tensor, name) for name in names)
    return kind, _value(context), tuple(None if part is None else _form(part) for part in parts)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def kind_of(layer: torch.nn.Module) -> Hashable:
    """A key for what a layer computes, apart from its weights' values and its position in the model."""
    parts = [
        (name, _behaviour_of(part, (pair for pair in _attributes_of(part) if pair[0] != "layer_idx")))
        for name, part in layer.named_modules()
    ]
    return tuple(parts), forms_of(layer)


def has_custom_hooks(model: PreTrainedModel) -> bool:
    """Whether a pass calls hooks other than transformers' own, which only collect outputs on request.

    A recorded, compiled or captured pass would not call them.
    """
    return any_global_hook() or any(map(_custom_hooks, model.modules()))


def runs_custom_python(model: PreTrainedModel) -> bool:
    """Whether a pass runs more than the operations of layers of transformers, torch and this package.

    That is the case with modules of other libraries (such as adapters), hooks, replaced or compiled methods, dropout,
    autocast, torch function modes, and weights of tensor subclasses that aren't `recordable`.
    """
    return (
        torch.is_autocast_enabled(model.device.type)
        or bool(FUNCTION_MODES.modes())
        or any(not (type(w) is torch.nn.Parameter or getattr(w, "recordable", False)) for w in model.parameters())
        or has_custom_hooks(model)
        or any(map(_runs_custom_python, model.modules()))
    )


def _custom_hooks(module: torch.nn.Module) -> list[Any]:
    return [
        hook for hook in forward_hooks(module) if not str(getattr(hook, "__module__", "")).startswith("transformers.")
    ]


def _runs_custom_python(module: torch.nn.Module) -> bool:
    return bool(
        module.training
        or not type(module).__module__.startswith(("torch.nn.", "transformers.", "hf_specdec."))
        or has_compiled_call(module)
        or "forward" in vars(module)
    )


def _module_state(module: torch.nn.Module) -> Hashable:
    parts = tuple((name, _serial(part)) for name, part in children_of(module).items())
    return _serial(module), parts, _behaviour_of(module, _attributes_of(module))


def _attributes_of(module: torch.nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in vars(module).items()
        if name in _ADAPTERS or not (name.startswith("_") or name in _MODULE_ATTRIBUTES)
    ]


def _behaviour_of(module: torch.nn.Module, attributes: Iterable[tuple[str, Any]]) -> Hashable:
    kind, values = type(module), tuple((name, _value(value)) for name, value in attributes)
    return kind, _serial(kind.forward), tuple(map(_serial, forward_hooks(module))), module.training, values


def _config_state(config: PreTrainedConfig) -> Hashable:
    """A configuration's values, including nested ones: models read some of them in every pass."""
    return tuple(
        (name, _config_state(value) if isinstance(value, PreTrainedConfig) else _value(value))
        for name, value in sorted(vars(config).items())
    )


def _value(value: Any) -> Hashable:
    """A plain value itself, a collection by its items, and anything else by identity."""
    if isinstance(value, _PLAIN):
        # 0 == -0.0 == False, and nan != nan.
        return (type(value).__name__, repr(value)) if isinstance(value, (bool, int, float)) else value
    if isinstance(value, (list, tuple)):
        return tuple(map(_value, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_value, value))
    if isinstance(value, dict):
        return tuple((_value(key), _value(part)) for key, part in value.items())
    if isinstance(value, partial):
        return _value((value.func, value.args, value.keywords))
    if isinstance(value, Tensor):
        return _serial(value), _form(value), _address(value)
    return _serial(value)


def _serial(thing: object) -> int:
    """A number that identifies an object while it lives; negative for objects without weak references.

    Positive numbers are never reused. A negative one may be reused after its object is deleted.
    """
    key = id(thing)
    known = _serials.get(key)
    if known is not None and known[0]() is thing:
        return known[1]
    try:
        # A later object may have the same address.
        watch = weakref.ref(thing, lambda _: _serials.pop(key, None))
    except TypeError:
        return -key
    number = next(_numbers)
    _serials[key] = watch, number
    return number
