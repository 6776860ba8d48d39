"""Tokens that transformers' processors exclude: by index, and in compiled steps by a mask.

transformers looks for every token of the vocabulary in the list of excluded ones. For Whisper base, with 51,865 and 88
tokens, this takes 1.4 ms for each position on two cores of an AMD Zen 3. By index, decoding with a draft is 1.4 times
as fast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process as host

from hf_specdec.compat.transformers_private import makes_own_processors

# By processor, the attribute that holds its list.
LISTS = {
    host.SuppressTokensLogitsProcessor: "suppress_tokens",
    host.SuppressTokensAtBeginLogitsProcessor: "begin_suppress_tokens",
}


def apply(processor: LogitsProcessor, ids: Tensor, scores: Tensor) -> Tensor:
    """The result of `processor(ids, scores)`: scores `[B, V]` of the tokens after `ids` `[B, n]`."""
    if (length := only_length(processor)) is not None and ids.shape[-1] != length:
        return scores
    tokens = getattr(processor, LISTS.get(type(processor), ""), None)
    if not isinstance(tokens, Tensor) or scores.device.type != "cpu":
        return processor(ids, scores)
    return scores.index_fill(-1, _known(tokens, scores.shape[-1]), -torch.inf)


class Suppression:
    """A processor of `LISTS` as operations on tensors, which can be compiled or captured.

    Args:
        processor: the processor.
        vocabulary: the most scores of a token.
        device: where the scores are.
    """

    def __init__(self, processor: LogitsProcessor, vocabulary: int, device: torch.device) -> None:
        self.mask = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        tokens = torch.as_tensor(getattr(processor, LISTS[type(processor)]))
        self.mask[_known(tokens, vocabulary).to(device)] = True
        only = only_length(processor)
        self._only = None if only is None else torch.tensor(only, device=device)

    def take_over(self, processor: LogitsProcessor) -> None:
        """Apply at the same length of a text as `processor`, which has the same list."""
        if self._only is not None and (only := only_length(processor)) is not None:
            self._only.fill_(only)

    def __call__(self, lengths: Tensor, scores: Tensor) -> Tensor:
        """The processed scores `[N, V]` of the tokens after texts of some `lengths` `[N]`."""
        mask = self.mask[: scores.shape[-1]]
        if self._only is not None:
            mask = (lengths == self._only).unsqueeze(1) & mask
        return scores.masked_fill(mask, -torch.inf)


def _known(tokens: Tensor, vocabulary: int) -> Tensor:
    """The tokens that are in the vocabulary. The dtype of an empty list is no index's."""
    return tokens[(tokens >= 0) & (tokens < vocabulary)].long()


def what_is_fixed(processor: LogitsProcessor) -> dict[str, Any]:
    """The attributes of a processor except those that `Suppression.take_over` follows."""
    return {name: value for name, value in vars(processor).items() if name != "begin_index"}


def add_dropped(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Add the processor that Whisper's `generate` leaves out of calls with an `assistant_model`; texts stay plain ones.

    Whisper passes `begin_suppress_tokens=None` on, so that transformers' drafts may end at once. A list that only this
    call was given is unknown by then: the model's is used.

    Args:
        call: the arguments that the general `generate` gets from Whisper's; changed.
    """
    tokens = getattr(model.generation_config, "begin_suppress_tokens", None)
    given = list(call.get("logits_processor") or ())
    begins = any(isinstance(one, host.SuppressTokensAtBeginLogitsProcessor) for one in given)
    if not makes_own_processors(model) or not tokens or begins or call.get("decoder_input_ids") is None:
        return
    ids = call["decoder_input_ids"]
    added = host.SuppressTokensAtBeginLogitsProcessor(tokens, ids.shape[-1], device=str(ids.device))
    place = int(bool(given) and isinstance(given[0], host.WhisperNoSpeechDetection))
    call["logits_processor"] = LogitsProcessorList([*given[:place], added, *given[place:]])


def only_length(processor: LogitsProcessor) -> int | None:
    """The one length of a text at which a processor changes scores; None if it may do so at any."""
    at_begin = type(processor) is host.SuppressTokensAtBeginLogitsProcessor
    return getattr(processor, "begin_index", None) if at_begin else None
