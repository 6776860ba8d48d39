"""What the installed transformers calls a model's cache; 5.24 has renamed it.

The name of the argument of `forward` and `generate` is also that of the field of their outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

# Up to 5.23, purely recurrent models had a name of their own, the first of these.
_BEFORE = ("cache_params", "past_key_values")
_RENAMED = "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__

# The name in most models, and in what `generate` returns.
CACHE_NAME = "cache" if _RENAMED else "past_key_values"
CACHE_NAMES = ("cache",) if _RENAMED else _BEFORE
# Names that `generate` still takes; it warns, and passes the cache on by the new one.
OUTDATED_NAMES = _BEFORE if _RENAMED else ()


def cache_argument(model: PreTrainedModel) -> str:
    """The argument of a model's `forward` that takes the cache."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAME)


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether a model's `forward` may take a cache; a signature may hide it."""
    parameters = inspect.signature(model.forward).parameters
    return cache_argument(model) in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def cache_of(arguments_or_output: Mapping[str, Any]) -> Any:
    """The cache among a model's arguments, or in an output of transformers; None where there is none."""
    return next((cache for name in CACHE_NAMES if (cache := arguments_or_output.get(name)) is not None), None)
