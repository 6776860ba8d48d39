"""What the package reads of accelerate's own attributes: the hooks that load weights and move inputs.

Seen in accelerate 1.10 to 1.15.
"""

from __future__ import annotations

from types import MethodType

from torch.nn import Module


def has_hook(module: Module) -> bool:
    """Whether accelerate has put a hook on a module. Without the attribute, no module counts as loaded by one."""
    return hasattr(module, "_hf_hook")


def change_class(module: Module, kind: type[Module]) -> None:
    """Give a module another class, also where accelerate's hook keeps the `forward` that it wraps.

    Without the attribute, the class alone is changed, as without accelerate.
    """
    module.__class__ = kind
    if hasattr(module, "_old_forward"):
        module._old_forward = MethodType(kind.forward, module)  # type: ignore[assignment]
