"""The head of a draft during training, if the draft only proposes some tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.trimmed_head import listed_tokens


class TrimmedVocabulary:
    """Replaces a draft's head by one of K rows until `restore`; neither it nor the embedding is trained.

    Unlike `TrimmedHead`, which is for decoding, it returns K logits instead of V, most of which would be -inf and cost
    memory for every token of a training step.

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
        # The column of each token; K for tokens that the draft does not propose.
        self.places = torch.full((self.whole.weight.shape[0],), len(tokens), device=rows.device)
        self.places[tokens] = torch.arange(len(tokens), device=rows.device)

    @classmethod
    def of(cls, draft: PreTrainedModel) -> TrimmedVocabulary | None:
        """The vocabulary of a draft whose configuration lists its `draft_tokens`; None for other drafts."""
        tokens = listed_tokens(draft.config)
        return cls(draft, tokens) if tokens else None

    def columns(self, tokens: Tensor) -> Tensor:
        """The columns of K logits for token ids, in the same shape; K for tokens that the draft does not propose."""
        return self.places.to(tokens.device)[tokens]

    def restore(self) -> None:
        """Restore the draft's own head."""
        self.draft.set_output_embeddings(self.whole)
        if self.bias is not None:
            self.draft.final_logits_bias = self.bias
        self.draft.config.tie_word_embeddings = self.tied
