"""Passes of an EAGLE-3 draft over rows of different lengths."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.chain_runner import ChainRunner
from hf_specdec.models.eagle_draft import Eagle3Draft
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.masks import check_attention
from hf_specdec.models.traits import MAX_VOCABULARY_PADDING, vocabulary_size


def layers_read(model: PreTrainedModel, draft: Eagle3Draft) -> list[int]:
    """The indices of the target's layers whose input a draft reads.

    Raises:
        ValueError: the draft does not fit the target; the message names the differences.
    """
    text, config = model.config.get_text_config(decoder=True), draft.config
    count, width = text.num_hidden_layers, config.transformer_layer_config.hidden_size
    layers = config.eagle_aux_hidden_state_layer_ids or [2, count // 2, count - 3]
    named = f"assistant_model={type(draft).__name__}"
    check_attention(config.transformer_layer_config, named)
    pairs = {
        "hidden states of width": (config.target_hidden_size, text.hidden_size),
        "its model's embeddings of width": (
            width if draft.embed_tokens is None else text.hidden_size,
            text.hidden_size,
        ),
        "the device": (draft.device, model.device),
    }
    unlike = [f"{what} {theirs}, not {ours}" for what, (theirs, ours) in pairs.items() if theirs != ours]
    if not all(0 <= layer < count for layer in layers):
        unlike.append(f"layers {layers}, not among {count}")
    if abs(config.vocab_size - vocabulary_size(model)) > MAX_VOCABULARY_PADDING:
        unlike.append(f"a vocabulary of {config.vocab_size} tokens, not {vocabulary_size(model)}")
    if unlike:
        raise ValueError(
            f"{named} was made for {'; '.join(unlike)} as model={type(model).__name__} has: choose the draft that was "
            "made for this model, on its device."
        )
    return layers


class Eagle3Runner(ChainRunner):
    """Runs an EAGLE-3 draft; each pass runs all of its layers.

    Args:
        draft: the draft.
        target: the target, whose embeddings are used if the draft has none.
        given: the arguments of `ChainRunner` from `model_kwargs` on.
    """

    def __init__(self, draft: Eagle3Draft, target: PreTrainedModel, *given: Any) -> None:
        states = HiddenStates(layers_read(target, draft))
        self._draft = draft
        self._embeddings: Any = target.get_input_embeddings() if draft.embed_tokens is None else draft.embed_tokens
        super().__init__(draft, draft.config.transformer_layer_config, 1, states, *given)

    def _given(self, places: int) -> tuple[Tensor, Tensor]:
        slots, states = super()._given(places)
        return slots, self._draft.fused(states)

    def _made(self, layer: int, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        masks = {kind: self._mask_of(kind) for kind in self._windows}
        embedded = self._embeddings(ids).to(hidden.dtype)
        made: Tensor = self._draft(embedded, hidden, masks, positions, self.cache)
        return made

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._draft.logits(hidden)
