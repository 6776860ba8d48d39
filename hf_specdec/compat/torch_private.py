"""What the package uses of torch beyond its documented interface. Seen in torch 2.6 to 2.13; inductor stands apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "pytree"]


def function_modes() -> int:
    """How many `TorchFunctionMode`s are active. Without the count, none."""
    count = getattr(torch._C, "_len_torch_function_stack", None)
    return 0 if count is None else int(count())


def any_global_hook() -> bool:
    """Whether hooks for all modules are set. Without the question, there are none."""
    ask = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    return ask is not None and bool(ask())


def forward_hooks(module: Module) -> tuple[Any, ...]:
    """The hooks that a module's call runs before and after its `forward`."""
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def has_compiled_call(module: Module) -> bool:
    """Whether `Module.compile` was called. Without the attribute, not."""
    return getattr(module, "_compiled_call_impl", None) is not None


def held_tensors(module: Module) -> list[Mapping[str, Tensor | None]]:
    """A module's own parameters and buffers by name, None among them."""
    return [held for held in (module._parameters, module._buffers) if held]


def children_of(module: Module) -> dict[str, Module | None]:
    """A module's children by name, None among them."""
    return module._modules


def replace_child(module: Module, name: str, child: Module) -> None:
    """Give a shallow copy of a module another child; the module that it is a copy of keeps its own."""
    module._modules = {**module._modules, name: child}


def schema_of(operation: Any) -> Any:
    """An operation's arguments and results; None where it has no schema, which counts as no view."""
    return getattr(operation, "_schema", None)


def is_composite(operation: Any) -> bool:
    """Whether an operation consists of others and is traced as these."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")


@cache
def linear_pointwise() -> Any:
    """oneDNN's linear layer as an operation; None where a build has none: layers go through `torch.nn.functional`."""
    operation = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    has_both = all(hasattr(operation, variant) for variant in ("default", "binary"))
    return operation if torch.backends.mkldnn.is_available() and has_both else None


def can_trace() -> bool:
    """Whether TorchScript can record: the build has what `torch.jit.trace` calls. If not, passes are not recorded."""
    has_both = all(hasattr(torch._C, name) for name in ("_create_graph_by_tracing", "_create_function_from_graph"))
    return has_both and bool(torch.jit._state._enabled)  # PYTORCH_JIT=0


def recorded(step: Callable[..., Any], inputs: Sequence[Tensor]) -> torch.jit.ScriptFunction:
    """A function of tensors as TorchScript; `torch.jit.trace` would keep it for the whole process."""
    graph, _ = torch._C._create_graph_by_tracing(step, tuple(inputs), lambda value: "", True, False)
    return torch._C._create_function_from_graph("step", graph)


def free_cublas_work_space() -> None:
    """Free the memory of a GPU's matrix products. Without the function it stays, as torch would leave it."""
    free = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if free is not None:
        free()


def fake_tensors(**options: Any) -> AbstractContextManager[Any]:
    """The mode in which inductor takes a step's inputs: tensors with a shape and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**options)


def conversions() -> tuple[Callable[[list[Tensor]], list[Any]], Callable[[Any], Sequence[Tensor]]] | None:
    """Functions from tensors to handles of torch's C interface, in capsules, and back.

    None where torch lacks them: Python calls a step's layers instead of C++.
    """
    interface = getattr(torch._C, "_aoti", None)
    handles_of = getattr(interface, "unsafe_alloc_void_ptrs_from_tensors", None)
    tensors_of = getattr(interface, "alloc_tensors_by_stealing_from_void_ptrs", None)
    return None if handles_of is None or tensors_of is None else (handles_of, tensors_of)


def tensor_pointer_function() -> int | None:
    """The address of the C function from a Python tensor to its data; None where torch lacks it, as `conversions`."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found: int | None = getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", None)
    return found
