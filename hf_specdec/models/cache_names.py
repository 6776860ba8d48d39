"""The name of a model's cache in the installed transformers; 5.24 has renamed it.

Arguments of `forward` and `generate` and the fields of their outputs share this name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

# Up to 5.23, purely recurrent models used a different name, the first of these.
_BEFORE = ("cache_params", "past_key_values")
_RENAMED = "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__

# The name in most models, and in the output of `generate`.
CACHE_NAME = "cache" if _RENAMED else "past_key_values"
CACHE_NAMES = ("cache",) if _RENAMED else _BEFORE
# Old names that `generate` still accepts with a warning, passing the cache on under the new one.
OUTDATED_NAMES = _BEFORE if _RENAMED else ()


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the cache argument of a model's `forward`."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAME)


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether a model's `forward` may accept a cache, even if its signature does not show it."""
    parameters = inspect.signature(model.forward).parameters
    return cache_argument(model) in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def cache_of(arguments_or_output: Mapping[str, Any]) -> Any:
    """The cache among a model's arguments, or in an output of transformers; None if there is none."""
    return next((cache for name in CACHE_NAMES if (cache := arguments_or_output.get(name)) is not None), None)
