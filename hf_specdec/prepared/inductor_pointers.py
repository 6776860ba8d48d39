"""Where loops write into pieces of a buffer, inductor's code on a CPU is given pointers instead of tensors.

`narrow_loops` sums for each token by itself, and each sum fills its piece of the tokens' stack. Inductor's code makes a
tensor of every such piece, several hundred in a pass, and frees it again, which takes a tenth of a verification; all
that its loops read of it is the pointer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_writing = threading.RLock()  # one step's code at a time, so that all leave the method as they found it


@contextmanager
def pieces_as_pointers() -> Iterator[None]:
    """While inductor writes code; keeps the contract of `CppWrapperCpu.codegen_deferred_allocation`."""
    # Importing these takes seconds.
    from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.codegen.wrapper import DeferredLine

    def as_pointer(wrapper: Any, name: str, view: Any) -> None:
        if not _is_for_loops(name):
            as_tensor(wrapper, name, view)
            return
        layout = view.get_layout()
        start = f"static_cast<{DTYPE_TO_CPP[layout.dtype]}*>({view.get_name()}.data_ptr()) + {layout.offset}"
        piece = "struct { void* start; void* data_ptr() const { return start; } void reset() {} }"
        wrapper.writeline(DeferredLine(name, f"{piece} {name}{{{start}}};"))

    with _writing:
        as_tensor = CppWrapperCpu.codegen_deferred_allocation
        CppWrapperCpu.codegen_deferred_allocation = as_pointer  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            CppWrapperCpu.codegen_deferred_allocation = as_tensor  # type: ignore[method-assign]


def _is_for_loops(name: str) -> bool:
    """Whether nothing but loops reads and writes a buffer: a library's call and the caller want a tensor."""
    from torch._inductor.scheduler import NopKernelSchedulerNode, SchedulerNode
    from torch._inductor.virtualized import V

    buffer = V.graph.scheduler.name_to_buf[name]
    nodes = [buffer.defining_op, *(user.node for user in buffer.users)]
    return all(isinstance(node, SchedulerNode | NopKernelSchedulerNode) for node in nodes)
