"""The head of a draft in training, where the draft proposes some tokens only."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


class TrimmedVocabulary:
    """A head of K rows in place of a draft's own, which `restore` puts back; neither it nor the embedding is trained.

    Unlike the `TrimmedHead` that decodes, it gives K logits instead of V, most of them -inf: training would need them
    for every token of a step.

    Args:
        draft: the model, modified in place.
        tokens: the K tokens.
    """

    def __init__(self, draft: PreTrainedModel, tokens: list[int]) -> None:
        self.draft, self.tied = draft, draft.config.tie_word_embeddings
        self.whole, self.bias = draft.get_output_embeddings(), getattr(draft, "final_logits_bias", None)
        rows = self.whole.weight.detach()[tokens]
        head = torch.nn.Linear(
            rows.shape[1], len(tokens), self.whole.bias is not None, device=rows.device, dtype=rows.dtype
        )
        head.weight.data.copy_(rows)
        if self.whole.bias is not None:
            head.bias.data.copy_(self.whole.bias.detach()[tokens])
        encoder = [draft.get_encoder()] if draft.config.is_encoder_decoder else []  # the target's own
        for module in (head, self.whole, draft.get_input_embeddings(), *encoder):
            module.requires_grad_(False)
        draft.set_output_embeddings(head)
        if self.bias is not None:
            draft.final_logits_bias = self.bias[:, tokens]
        draft.config.tie_word_embeddings = False
        # The column of each token; the one behind the last for those that the draft does not propose.
        self.places = torch.full((self.whole.weight.shape[0],), len(tokens), device=rows.device)
        self.places[tokens] = torch.arange(len(tokens), device=rows.device)

    @classmethod
    def of(cls, draft: PreTrainedModel) -> TrimmedVocabulary | None:
        """Of a draft whose configuration names its `draft_tokens`; None of others."""
        tokens = getattr(draft.config, "draft_tokens", None)
        return cls(draft, list(tokens)) if tokens else None

    def columns(self, tokens: Tensor) -> Tensor:
        """The columns of K logits for token ids, in the same shape; K for tokens that the draft does not propose."""
        return self.places.to(tokens.device)[tokens]

    def restore(self) -> None:
        """Gives the draft its own head back."""
        self.draft.set_output_embeddings(self.whole)
        if self.bias is not None:
            self.draft.final_logits_bias = self.bias
        self.draft.config.tie_word_embeddings = self.tied
