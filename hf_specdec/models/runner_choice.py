"""The choice of a model's runner."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.cache_names import cache_of
from hf_specdec.models.dynamic_runner import DynamicRunner
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.own_inputs import own_inputs
from hf_specdec.models.recurrent_runner import RecurrentRunner
from hf_specdec.models.recurrent_states import recurrent_layers
from hf_specdec.models.row_by_row_runner import RowByRowRunner
from hf_specdec.models.sight import prompt_is_read_alone
from hf_specdec.models.static_cache import RowsCache
from hf_specdec.models.static_runner import StaticRunner
from hf_specdec.models.traits import keeps_pictures_apart, takes_row_positions, text_prefix, unmasked_window

Runner = DynamicRunner | RowByRowRunner | StaticRunner


def runner_for(
    model: PreTrainedModel,
    model_kwargs: dict[str, Any],
    input_ids: Tensor,
    capacity: int,
    hidden: int = 0,
    kernels: Kernels = onednn_linears,
    chunk: int | None = None,
    argument: str = "model",
) -> Runner:
    """The runner for a model, a batch of `input_ids` `[B, P]` and its cache; arguments as `DynamicRunner`.

    Args:
        argument: the argument that passed the model, for messages.

    Raises:
        ValueError: the model cannot read drafts: it makes its own inputs, its tokens see later ones, or only its cache
            enforces its window.
    """
    cache = cache_of(model_kwargs)
    window = unmasked_window(model, cache)
    if window is not None and capacity + hidden > window:
        raise ValueError(
            f"{argument}={type(model).__name__} limits attention to {window} tokens by dropping others from its cache, "
            "which a pass over several tokens would see: keep the text shorter, or decode without speculation."
        )
    # A static cache is only made for models that take inputs as given.
    prepared = None if isinstance(cache, RowsCache) else own_inputs(model, model_kwargs, input_ids, argument)
    alone = prompt_is_read_alone(model, model_kwargs, input_ids, argument)
    if isinstance(cache, RowsCache):
        return StaticRunner(model, model_kwargs, (len(input_ids), input_ids.shape[1]), kernels, chunk, alone)
    kind: type[DynamicRunner | RowByRowRunner] = DynamicRunner
    if recurrent_layers(cache):
        kind = RecurrentRunner
    elif len(input_ids) > 1 and not _rows_share_passes(model, prepared):
        kind = RowByRowRunner
    return kind(model, model_kwargs, input_ids, capacity, hidden, kernels, chunk, alone)


def _rows_share_passes(model: PreTrainedModel, prepared: Mapping[str, Any] | None) -> bool:
    """Whether rows may be at different positions in a pass.

    Args:
        model: the model.
        prepared: the inputs of a model that prepares them itself; else None.
    """
    if not takes_row_positions(model) or keeps_pictures_apart(model):
        return False
    key = f"{text_prefix(model)}position_ids"
    takes_positions = key in inspect.signature(model.forward).parameters
    return prepared is None or not takes_positions or prepared.get(key) is not None
