"""Passes of a draft that reads the target's keys instead of its own, such as Gemma 4's assistants.

Each drafted token is read at the position of the text's last token, with the previous hidden state: first the
target's, then the draft's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.states_runner import StatesRunner
from hf_specdec.models.traits import on_device


def shared_layers(model: PreTrainedModel, draft: PreTrainedModel) -> dict[str, int]:
    """The target's layers whose keys a draft reads, by kind.

    Raises:
        ValueError: the target has no such layers, or another width.
    """
    named = f"assistant_model={type(draft).__name__}"
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in model.get_decoder().layers]
    stored = {
        str(attention.layer_type): at
        for at, attention in enumerate(attentions)
        if getattr(attention, "store_full_length_kv", False)
    }
    width, own = model.config.get_text_config(decoder=True).hidden_size, draft.config.backbone_hidden_size
    if not stored or width != own:
        raise ValueError(
            f"{named} reads keys that layers share and hidden states of width {own}, but model={type(model).__name__} "
            f"has {len(stored)} such layers and states of width {width}: use the Gemma 4 model that it was made for."
        )
    return stored


class KeyReadingRunner(StatesRunner):
    """Runs such a draft, one pass per token.

    Args:
        draft: the draft.
        target: the target, whose embeddings the draft uses.
        model_kwargs, input_ids, capacity: see `StatesRunner`.
        kernels: makes the context manager for passes.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        target: PreTrainedModel,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
        capacity: int,
        kernels: Kernels = onednn_linears,
    ) -> None:
        self._shared = shared_layers(target, draft)
        self.draft: Any = draft
        self._embeddings = target.get_input_embeddings()
        text = draft.config.get_text_config()
        self._windows = {kind: text.sliding_window if kind == "sliding_attention" else None for kind in self._shared}
        super().__init__(text, HiddenStates([-1]), model_kwargs, input_ids, capacity)
        self._kernels = kernels(draft)
        self._hidden: Tensor | None = None

    def rewind(self, lengths: Sequence[int]) -> None:
        """As `StatesRunner.rewind`."""
        super().rewind(lengths)
        self._hidden = None

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """As `StatesRunner.forward`."""
        tokens = tokens[:, -1:].to(self._device) if self._hidden is not None else self._start(tokens.to(self._device))
        assert self._hidden is not None
        inputs = torch.cat([self._embeddings(tokens), self._hidden], dim=-1)
        with self._kernels():
            last = self.draft.model(
                inputs_embeds=self.draft.pre_projection(inputs),
                attention_mask=self._masks,
                position_ids=self._place,
                shared_kv_states=self._keys,
                use_cache=False,
            ).last_hidden_state
            self._hidden = self.draft.post_projection(last)
            ordered = self.draft.masked_embedding
            logits: Tensor = self.draft.lm_head(last) if ordered is None else ordered(last, self.draft.lm_head.weight)
        self.passes += 1
        return logits

    def _start(self, tokens: Tensor) -> Tensor:
        """Read the texts' last `tokens` `[B, k]`; return the last one of each row `[B, 1]`."""
        self._go_on(tokens.shape[1])
        self._hidden = self.states.of([max(length - 2, 0) for length in self._texts], 1).to(self._device)
        last = on_device([length - 1 for length in self._texts], self._device).unsqueeze(1)
        if max(self._texts) > self._total:
            self._make_tables(2 * max(self._texts))
        self._place = self._table.gather(1, last)
        self._keys, self._masks = {}, {}
        for kind, layer in self._shared.items():
            keys, values, shown = self.states.runner.keys_of(layer)
            self._keys[kind], self._masks[kind] = (keys, values), self._mask_of(shown, self._windows[kind])
        self._settle()
        return tokens[:, -1:]

    def _mask_of(self, shown: Tensor, window: int | None) -> Tensor:
        """The additive mask `[B, 1, 1, n]` for slots `[B, n]` that hold tokens: the last `window` + 1 of each row."""
        if window is not None:
            following = shown.flip(1).cumsum(1).flip(1)
            shown = shown & (following <= window + 1)
        dtype = self.draft.dtype
        hidden = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill(~shown, torch.finfo(dtype).min)
        return hidden[:, None, None]
