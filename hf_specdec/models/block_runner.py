"""Passes of a DFlash draft, which drafts a block of tokens at once, over rows of different lengths.

Its keys and values come from the target's hidden states and from the block: the text's last token and mask tokens,
which attend to each other and to everything before. The block is not kept after its pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.compat.mtp_private import check_version
from hf_specdec.models.cache_names import CACHE_NAME
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.models.masks import attention_windows, check_attention
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.states_runner import StatesRunner
from hf_specdec.models.traits import on_device


def check_block_draft(model: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Refuse a DFlash draft that does not fit the target.

    Raises:
        ValueError: names the mismatch, or a version of transformers that is too old, and the way out.
    """
    check_version("drafter='dflash'")
    named = f"drafter='dflash' with assistant_model={type(draft).__name__}"
    width = model.config.get_text_config(decoder=True).hidden_size
    if draft.config.hidden_size != width:
        raise ValueError(
            f"{named} of width {draft.config.hidden_size}: {type(model).__name__} has hidden states of width {width}; "
            "choose the draft that was made for this model."
        )
    check_attention(draft.config, named)


class BlockRunner(StatesRunner):
    """Runs a DFlash draft: a pass computes the logits of a whole block, which `forward` returns one by one.

    Args:
        draft: the draft.
        target: the target, whose embeddings and head are used.
        model_kwargs, input_ids, capacity: see `StatesRunner`.
        longest: the most tokens to draft.
        kernels: makes the context that passes run in.

    Attributes:
        most: the most tokens of a draft.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        target: PreTrainedModel,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
        capacity: int,
        longest: int,
        kernels: Kernels = onednn_linears,
    ) -> None:
        config: Any = draft.config
        self.draft, self._embeddings, self._head = draft, target.get_input_embeddings(), target.get_output_embeddings()
        self._block, self._masked = config.block_size, config.mask_token_id
        self.most = min(longest, self._block - 1)
        states = HiddenStates([layer + 1 for layer in config.target_layer_ids])
        super().__init__(config, states, model_kwargs, input_ids, capacity, ahead=self._block)
        self._windows = attention_windows(config)
        self._kernels = kernels(draft)
        self._left: list[Tensor] = []

    def rewind(self, lengths: Sequence[int]) -> None:
        """As `StatesRunner.rewind`."""
        super().rewind(lengths)
        self._left = []

    def forward(self, tokens: Tensor, count: int) -> Tensor:
        """As `StatesRunner.forward`. Tokens of a block do not depend on each other."""
        if not self._left:
            self._left = list(self._logits(tokens.to(self._device)).unbind(1))
        return self._left.pop(0).unsqueeze(1)

    def _logits(self, tokens: Tensor) -> Tensor:
        """Logits `[B, most, V]` of the block after the texts' last `tokens` `[B, k]`."""
        counts = self._go_on(tokens.shape[1])
        places = max([1, *counts])
        context, states = self._given(places)
        anchors = on_device([length - 1 for length in self._texts], self._device).unsqueeze(1)
        block = anchors + torch.arange(self._block, device=self._device)
        # Places without hidden states are written after the row's block, where nothing attends to them.
        slots = torch.cat([torch.where(context < anchors, context, context + self._block), block], dim=1)
        span = max(self._texts) + self._block + places
        visible = self._reserve(slots, span)
        ids = torch.cat([tokens[:, -1:], tokens.new_full((len(tokens), self._block - 1), self._masked)], dim=1)
        with self._kernels():
            outputs = self.draft(
                noise_embeds=self._embedded(ids),
                context_hidden_states=states,
                attention_mask=self._masks(block, span, visible),
                position_ids=self._table.gather(1, slots),
                **{CACHE_NAME: self.cache},
            )
            logits: Tensor = self._head(outputs.last_hidden_state[:, 1 : 1 + self.most])
        self.passes += 1
        self._settle()
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        """The target's embeddings without the norm that some targets add, as in the draft's training."""
        if hasattr(self._embeddings, "embed_norm"):
            return torch.nn.Embedding.forward(self._embeddings, ids)
        embedded: Tensor = self._embeddings(ids)
        return embedded

    def _masks(self, block: Tensor, span: int, visible: Tensor | None) -> dict[str, Tensor]:
        """Additive masks `[B, 1, block, span]` by kind of layer: a block sees itself and all before, in a window."""
        keys = torch.arange(span, device=self._device)
        seen = (keys <= block[:, -1:]).unsqueeze(1).expand(-1, self._block, -1)
        if visible is not None:
            seen = seen & visible.unsqueeze(1)
        distance = (block.unsqueeze(2) - keys).abs()
        dtype, masks = self.draft.dtype, {}
        for kind, window in self._windows.items():
            shown = seen if window is None else seen & (distance <= window)
            mask = torch.zeros(shown.shape, dtype=dtype, device=self._device)
            masks[kind] = mask.masked_fill(~shown, torch.finfo(dtype).min).unsqueeze(1)
        return masks
