"""Keys and values of stored encodings: they are not trained, so each is computed once."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

_PROJECTIONS = re.compile(r"(encoder_attn\.[kv]_proj|EncDecAttention\.[kv])$")
_MOST_BYTES = 2**32


class EncodingKeys:
    """Freezes the layers of a decoder that project the encoding, and keeps what they return for each answer.

    An encoding is much longer than its answer, so these projections would take half of a training step. The trained
    projections of queries and outputs can make up for them.

    Args:
        draft: the model, modified in place until `restore`.
    """

    def __init__(self, draft: PreTrainedModel) -> None:
        self.indexes: list[int] = []
        self.lengths: list[int] = []
        self.bytes = 0
        named = draft.get_decoder().named_modules()
        found = [module for name, module in named if _PROJECTIONS.search(name)]
        self.projections = [module for module in found if isinstance(module, torch.nn.Linear)]
        for projection in self.projections:
            projection.requires_grad_(False)
            projection.forward = _Projected(self, projection)  # type: ignore[method-assign, assignment]

    def read(self, batch: Mapping[str, Tensor]) -> None:
        """Prepare for a pass over a batch of the `Collator`."""
        self.indexes, self.lengths = batch["index"].tolist(), batch["attention_mask"].sum(-1).tolist()

    def restore(self) -> None:
        """Let the layers compute again."""
        for projection in self.projections:
            del projection.forward


class _Projected:
    """The forward of a projection: states `[B, S, H]` to `[B, S, K]`, rounded to half precision as encodings are."""

    def __init__(self, keys: EncodingKeys, projection: torch.nn.Linear) -> None:
        self.keys, self.projection = keys, projection
        self.known: dict[int, Tensor] = {}  # by index of the answer

    def __call__(self, states: Tensor) -> Tensor:
        keys = self.keys
        missing = [place for place, index in enumerate(keys.indexes) if index not in self.known]
        computed: dict[int, Tensor] = {}
        if missing:
            rows = linear(states[missing], self.projection.weight, self.projection.bias)
            computed = {
                keys.indexes[place]: row[: keys.lengths[place]].half() for place, row in zip(missing, rows, strict=True)
            }
        if keys.bytes < _MOST_BYTES:
            # Copied, since a part of a batch would keep all of it.
            self.known |= {index: row.clone() for index, row in computed.items()}
            keys.bytes += sum(row.nbytes for row in computed.values())
        found = [computed[index] if index in computed else self.known[index] for index in keys.indexes]
        return pad_sequence([row.to(states.dtype) for row in found], batch_first=True)
