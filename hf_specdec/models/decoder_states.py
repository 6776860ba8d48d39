"""Attentions and hidden states of a decoder, token by token, from one pass over the finished text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.cache_names import cache_argument

# The fields of an output of `generate` for each of its arguments: the encoder's, and the decoder's.
STATES = {
    "output_attentions": ({"encoder_attentions": "attentions"}, ("decoder_attentions", "cross_attentions")),
    "output_hidden_states": ({"encoder_hidden_states": "hidden_states"}, ("decoder_hidden_states",)),
}


def decoder_states(
    model: PreTrainedModel, model_kwargs: Mapping[str, Any], text: Tensor, prompt_length: int, asked: Collection[str]
) -> dict[str, Any]:
    """What plain `generate` returns for `output_attentions` and `output_hidden_states`.

    A speculative pass covers several tokens and drops some, so the text is read once more instead. Rows that ended
    early are read with their padding, as in plain `generate`.

    Args:
        model: an encoder-decoder model.
        model_kwargs: what `generate` prepared for it; its cache is not used.
        text: `[B, N]`, prompts and new tokens.
        prompt_length: P.
        asked: which of the two arguments are true; nothing is read if none is.

    Returns:
        Fields of the output. The decoder's have an entry for each of the N - P new tokens, and in it for each layer:
        attentions `[B, heads, q, keys]` and hidden states `[B, q, width]` of the token's pass, whose q is P for the
        first token and 1 for the others.
    """
    if not asked:
        return {}
    read = text[:, :-1]
    kwargs: dict[str, Any] = {**model_kwargs, cache_argument(model): None, "use_cache": False}
    if (mask := kwargs.get("decoder_attention_mask")) is not None:
        kwargs["decoder_attention_mask"] = torch.nn.functional.pad(mask, (0, read.shape[1] - mask.shape[1]), value=1)
    with torch.no_grad():
        inputs = model.prepare_inputs_for_generation(read, is_first_iteration=True, **kwargs)
        outputs = model(**inputs, **dict.fromkeys(asked, True), return_dict=True)
    states: dict[str, Any] = {}
    for argument in asked:
        of_encoder, of_decoder = STATES[argument]
        states |= {field: kwargs["encoder_outputs"].get(name) for field, name in of_encoder.items()}
        states |= {field: tuple(_by_token(outputs[field], prompt_length, field)) for field in of_decoder}
    return states


def _by_token(layers: Sequence[Tensor], prompt_length: int, field: str) -> Iterator[tuple[Tensor, ...]]:
    """The part of each layer's states that belongs to each new token."""
    ends = range(prompt_length, layers[0].shape[-2] + 1) if layers else ()
    for end in ends:
        start = end - 1 if end > prompt_length else 0
        keys = end if field == "decoder_attentions" else layers[0].shape[-1]
        yield tuple(layer[..., start:end, :keys] for layer in layers)
