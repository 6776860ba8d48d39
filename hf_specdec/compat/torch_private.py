"""The private parts of torch that the package uses, except inductor's. Seen in torch 2.6 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "pytree"]


TO_COPY = torch.ops.aten._to_copy.default  # the operation of `Tensor.to` in `__torch_dispatch__`


def wrapper_tensor(kind: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a subclass without its own storage, for numbers stored in another form."""
    made: Tensor = Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)
    return made


def without_torch_function() -> AbstractContextManager[None]:
    """Call functions in this block without dispatch to tensor subclasses."""
    off: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return off


class ModeStack:
    """The active modes of a kind in a thread; empty without the functions that read the stack.

    Args:
        kind: "function" or "dispatch".
    """

    def __init__(self, kind: str) -> None:
        names = f"_len_torch_{kind}_stack", f"_get_{kind}_stack_at"
        self._length, self._at, self._push, self._pop = (
            getattr(torch._C, name, None)
            for name in (*names, f"_push_on_torch_{kind}_stack", f"_pop_torch_{kind}_stack")
        )
        self._which = (None,) if kind == "dispatch" else ()  # any

    def modes(self) -> list[Any]:
        """The modes from the outermost to the innermost."""
        return [] if self._length is None or self._at is None else [self._at(place) for place in range(self._length())]

    def restore(self, modes: Sequence[Any]) -> None:
        """Activate exactly these modes."""
        if self._push is None or self._pop is None:
            return
        for _ in self.modes():
            self._pop(*self._which)
        for mode in modes:
            self._push(mode)


FUNCTION_MODES, DISPATCH_MODES = ModeStack("function"), ModeStack("dispatch")


def dispatch_flags() -> dict[str, bool]:
    """torch's variables that say whether dispatch modes are active; empty without them."""
    return {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}


def set_dispatch_flags(flags: Mapping[str, bool]) -> None:
    """Restore the result of `dispatch_flags`; torch's C++ keeps one of them as well."""
    vars(_python_dispatch).update(flags)
    tell = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
    flag = flags.get("_is_in_any_mode_without_ignore_compile_internals")
    if tell is not None and flag is not None:
        tell(flag)


def optimizes_graphs() -> bool:
    """Whether TorchScript optimizes in this thread; True without the function."""
    ask = getattr(torch._C, "_get_graph_executor_optimize", None)
    return ask is None or bool(ask())


def set_optimizes_graphs(value: bool) -> None:
    """Set TorchScript's optimization permanently, unlike `torch.jit.optimized_execution`."""
    change = getattr(torch._C, "_set_graph_executor_optimize", None)
    if change is not None:
        change(value)


def any_global_hook() -> bool:
    """Whether hooks for all modules are set; False without the attributes."""
    ask = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    return ask is not None and bool(ask())


def forward_hooks(module: Module) -> tuple[Any, ...]:
    """The hooks that a module's call runs before and after its `forward`."""
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def has_compiled_call(module: Module) -> bool:
    """Whether `Module.compile` was called; False without the attribute."""
    return getattr(module, "_compiled_call_impl", None) is not None


def held_tensors(module: Module) -> list[Mapping[str, Tensor | None]]:
    """A module's own parameters and buffers by name, including None."""
    return [held for held in (module._parameters, module._buffers) if held]


def children_of(module: Module) -> dict[str, Module | None]:
    """A module's children by name, including None."""
    return module._modules


def replace_child(module: Module, name: str, child: Module) -> None:
    """Replace a child of a module's shallow copy; the original module keeps its own."""
    module._modules = {**module._modules, name: child}


def schema_of(operation: Any) -> Any:
    """An operation's arguments and results; None without a schema, which counts as no view."""
    return getattr(operation, "_schema", None)


def is_composite(operation: Any) -> bool:
    """Whether an operation consists of others and is traced as these."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")


@cache
def linear_pointwise() -> Any:
    """oneDNN's linear layer as an operation; None if the build lacks it: layers then use `torch.nn.functional`."""
    operation = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    has_both = all(hasattr(operation, variant) for variant in ("default", "binary"))
    return operation if torch.backends.mkldnn.is_available() and has_both else None


def can_trace() -> bool:
    """Whether TorchScript can record: the build has the functions that `torch.jit.trace` calls."""
    has_both = all(hasattr(torch._C, name) for name in ("_create_graph_by_tracing", "_create_function_from_graph"))
    return has_both and bool(torch.jit._state._enabled)  # PYTORCH_JIT=0


def recorded(step: Callable[..., Any], inputs: Sequence[Tensor]) -> torch.jit.ScriptFunction:
    """Compile a function of tensors to TorchScript; `torch.jit.trace` would keep it for the whole process."""
    graph, _ = torch._C._create_graph_by_tracing(step, tuple(inputs), lambda value: "", True, False)
    return torch._C._create_function_from_graph("step", graph)


def free_cublas_work_space() -> None:
    """Free the work space of a GPU's matrix products. Without the function it is kept, as torch does by default."""
    free = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if free is not None:
        free()


def fake_tensors(**options: Any) -> AbstractContextManager[Any]:
    """The mode for inductor's example inputs: tensors with a shape and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**options)


def conversions() -> tuple[Callable[[list[Tensor]], list[Any]], Callable[[Any], Sequence[Tensor]]] | None:
    """Functions from tensors to handles of torch's C interface, in capsules, and back.

    None if torch lacks them: code on disk cannot be called then, and is compiled again.
    """
    interface = getattr(torch._C, "_aoti", None)
    handles_of = getattr(interface, "unsafe_alloc_void_ptrs_from_tensors", None)
    tensors_of = getattr(interface, "alloc_tensors_by_stealing_from_void_ptrs", None)
    return None if handles_of is None or tensors_of is None else (handles_of, tensors_of)


def tensor_pointer_function() -> int | None:
    """The address of the C function from a Python tensor to its data; None if torch lacks it, as in `conversions`."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found: int | None = getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", None)
    return found
