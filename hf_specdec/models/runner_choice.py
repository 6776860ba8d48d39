"""The choice of a model's runner."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.cache_names import cache_of
from hf_specdec.models.dynamic_runner import DynamicRunner, RowByRowRunner
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.recurrent_runner import RecurrentRunner
from hf_specdec.models.recurrent_states import recurrent_layers
from hf_specdec.models.static_cache import RowsCache
from hf_specdec.models.static_runner import StaticRunner
from hf_specdec.models.traits import takes_row_positions

Runner = DynamicRunner | RowByRowRunner | StaticRunner


def runner_for(
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
    input_ids: Tensor,
    capacity: int,
    hidden: int = 0,
    kernels: Kernels = onednn_linears,
    chunk: int | None = None,
) -> Runner:
    """The runner for a model, a batch of `input_ids` `[B, P]` and its cache; arguments as `DynamicRunner`."""
    cache = cache_of(model_kwargs)
    if isinstance(cache, RowsCache):
        return StaticRunner(model, model_kwargs, input_ids, kernels, chunk)
    if recurrent_layers(cache):
        return RecurrentRunner(model, model_kwargs, input_ids, capacity, hidden, kernels, chunk)
    batched = len(input_ids) == 1 or takes_row_positions(model)
    kind = DynamicRunner if batched else RowByRowRunner
    return kind(model, model_kwargs, input_ids, capacity, hidden, kernels, chunk)
