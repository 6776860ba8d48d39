"""accelerate's private attributes that the package uses: the hooks that load weights and move inputs.

Seen in accelerate 1.10 to 1.15.
"""

from __future__ import annotations

from types import MethodType

from torch.nn import Module


def has_hook(module: Module) -> bool:
    """Whether accelerate has put a hook on a module; False without the attribute."""
    return hasattr(module, "_hf_hook")


def change_class(module: Module, kind: type[Module]) -> None:
    """Change a module's class, even if accelerate's hook keeps the `forward` that it wraps.

    Without the attribute, the class alone is changed, as without accelerate.
    """
    module.__class__ = kind
    if hasattr(module, "_old_forward"):
        module._old_forward = MethodType(kind.forward, module)  # type: ignore[assignment]
