"""What code made from a model depends on: calls that find the model in one state share it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from transformers import PreTrainedModel

# By these names PEFT's layers say which adapter is at work.
_ADAPTERS = ("_active_adapter", "_disable_adapters")


def state_of(model: PreTrainedModel) -> Hashable:
    """A model's very weights, modules, hooks, adapters, attention, autocast.

    Other attributes of modules, should any be changed between calls, are not noticed.
    """
    # Weights of a tensor class of their own (quantized ones) may have no address to ask for.
    weights = tuple((id(p), p.data_ptr() if type(p) is torch.nn.Parameter else 0, p.dtype) for p in model.parameters())
    modules = tuple(
        (id(m), len(m._forward_hooks), len(m._forward_pre_hooks), *(str(vars(m).get(name)) for name in _ADAPTERS))
        for m in model.modules()
    )
    config = model.config.get_text_config(decoder=True)
    cast = torch.is_autocast_enabled(model.device.type) and torch.get_autocast_dtype(model.device.type)
    state = (str(model.device), model.training, config._attn_implementation, cast)
    return (id(model), *state, hash(weights), hash(modules))


def has_python_of_its_own(model: PreTrainedModel) -> bool:
    """Whether calling a model runs more than its layers' operations.

    Hooks do, methods that were replaced or compiled, dropout, autocast, weights of a tensor class of their own.
    """
    return (
        model.training
        or torch.is_autocast_enabled(model.device.type)
        or torch.nn.modules.module._has_any_global_hook()
        or any(type(weight) is not torch.nn.Parameter for weight in model.parameters())
        or any(
            m._forward_hooks or m._forward_pre_hooks or m._compiled_call_impl is not None or "forward" in vars(m)
            for m in model.modules()
        )
    )
