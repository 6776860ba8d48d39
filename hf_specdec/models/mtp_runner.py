"""Passes of a target's own multi-token-prediction layers over rows of different lengths."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.compat import mtp_private
from hf_specdec.models.cache_names import CACHE_NAME
from hf_specdec.models.chain_runner import ChainRunner
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.masks import check_attention
from hf_specdec.models.per_target import PerTarget

_loaded: PerTarget[Any] = PerTarget()


def mtp_layers(model: PreTrainedModel) -> Any:
    """A target's multi-token-prediction layers, loaded once from its checkpoint.

    Raises:
        ValueError: transformers is too old, there are no such layers, or they cannot be run; the message says which.
    """
    named = f"drafter='mtp' with model={type(model).__name__}"
    mtp_private.check_version(named)
    count = mtp_private.layer_count(model)
    if not count:
        raise ValueError(
            f"{named}: its configuration has no num_mtp_layers, so it has no multi-token-prediction layers: "
            "choose another drafter, or a checkpoint with such layers."
        )
    try:
        layers = _loaded.of(model, (count, model.dtype, model.device), lambda: mtp_private.load(model))
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{named}: its multi-token-prediction layers can't be loaded from its checkpoint "
            f"{model.config.name_or_path!r}: choose another drafter, or a checkpoint with such layers. ({error})"
        ) from error
    check_attention(layers.config, named, otherwise=", or another drafter")
    return layers


class MtpRunner(ChainRunner):
    """Runs multi-token-prediction layers.

    Args:
        layers: see `mtp_layers`.
        given: the arguments of `ChainRunner` from `model_kwargs` on.
    """

    def __init__(self, layers: Any, *given: Any) -> None:
        self._layers, self._kinds = layers, getattr(layers.config, "layer_types", None)
        super().__init__(layers, layers.config, len(layers.layers), HiddenStates([-1]), *given)

    def _made(self, layer: int, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        mask = self._mask_of(self._kinds[layer] if self._kinds is not None else "full_attention")
        embedded, cache = self._layers.embed_tokens(ids), {CACHE_NAME: self.cache}
        return mtp_private.layer_states(self._layers, layer, embedded, hidden, positions, mask, cache)

    def _logits(self, hidden: Tensor) -> Tensor:
        return mtp_private.logits(self._layers, hidden)
