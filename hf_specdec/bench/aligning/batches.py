"""Batches of prompts with answers, and the logits that predict the answers' tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.models.processor import multiplies_bfloat16

IGNORED = -100  # the label of tokens outside answers
_INPUTS = ("input_ids", "attention_mask", "decoder_input_ids", "position_ids")

# {"prompt": tokens, "answer": tokens with EOS}, and the optional columns of `answers.target_answers`
Row = Mapping[str, Any]


class Collator:
    """Turns rows into tensors, padded on the right; labels are at the positions of the logits that predict them.

    Returns `input_ids`, `attention_mask` and `labels` `[B, L]`. For an encoder-decoder, labels have the shape of
    `decoder_input_ids`, and stored encodings, as `encoding` `[B, S, H]` with `index` `[B]`, replace the ids. Stored
    distributions become `target_tokens [N, K]` and `target_log_probs [N, K + 1]`, over the N tokens of all answers, row
    by row.
    """

    def __init__(self, pair: LoadedPair) -> None:
        self.encoder_decoder = pair.encoder_decoder
        self.pad = pair.tokenizer.pad_token_id or 0
        start = pair.target.generation_config.decoder_start_token_id
        self.start = pair.target.config.decoder_start_token_id if start is None and self.encoder_decoder else start
        self.width = pair.target.get_encoder().config.hidden_size if self.encoder_decoder else 0

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        prompts, answers = ([list(row[name]) for row in rows] for name in ("prompt", "answer"))
        if self.encoder_decoder:
            batch = self._encoded(rows) if "encoding" in rows[0] else self._padded(prompts)
            begun = [(list(row.get("start", [self.start])), answer) for row, answer in zip(rows, answers, strict=True)]
            batch["decoder_input_ids"] = rectangle([[*start, *answer[:-1]] for start, answer in begun], self.pad)
            batch["labels"] = rectangle([[IGNORED] * (len(start) - 1) + answer for start, answer in begun], IGNORED)
        else:
            both = list(zip(prompts, answers, strict=True))
            batch = self._padded([[*prompt, *answer[:-1]] for prompt, answer in both])
            batch["labels"] = rectangle([[IGNORED] * (len(prompt) - 1) + answer for prompt, answer in both], IGNORED)
        if "encoding" in rows[0]:
            batch["index"] = torch.tensor([row["index"] for row in rows])
        for name in ("target_tokens", "target_log_probs"):
            if name in rows[0]:
                batch[name] = torch.tensor([position for row in rows for position in row[name]])
        return batch

    def prompts(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The prompts of a batch as arguments of `generate()`; padded on the left for a decoder-only model."""
        if self.encoder_decoder:
            return {name: batch[name] for name in ("input_ids", "attention_mask")}
        lengths = [int(row.ne(IGNORED).nonzero()[0]) + 1 for row in batch["labels"]]
        rows = [ids[:length].tolist() for ids, length in zip(batch["input_ids"], lengths, strict=True)]
        device = batch["input_ids"].device
        return {name: tensor.to(device) for name, tensor in self._padded(rows, "left").items()}

    def _encoded(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        read = [torch.frombuffer(bytearray(row["encoding"]), dtype=torch.float16) for row in rows]
        encoded = [one.reshape(-1, self.width).float() for one in read]
        mask = rectangle([[1] * len(one) for one in encoded], 0)
        return {"encoding": pad_sequence(encoded, batch_first=True), "attention_mask": mask}

    def _padded(self, rows: Sequence[Sequence[int]], side: str = "right") -> dict[str, Tensor]:
        mask = rectangle([[1] * len(row) for row in rows], 0, side)
        return {"input_ids": rectangle(rows, self.pad, side), "attention_mask": mask}


def answer_logits(model: PreTrainedModel, batch: Mapping[str, Tensor], inner: PreTrainedModel | None = None) -> Tensor:
    """The logits `[N, V]` that predict the answers' tokens, row by row, in at least float32.

    The head reads only the hidden states at these positions: over long prompts it would take most of a step's time and
    memory.

    Args:
        inner: the model itself if `model` wraps it.
    """

    def chosen(head: torch.nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (states,) = arguments
        return (states[batch["labels"].to(states.device) != IGNORED],)

    hook = (inner or model).get_output_embeddings().register_forward_pre_hook(chosen)
    try:
        logits: Tensor = model(**model_inputs(inner or model, batch), use_cache=False).logits
    finally:
        hook.remove()
    return logits if logits.dtype == torch.float64 else logits.float()


def model_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """The part of a batch that a pass reads, on the model's device."""
    inputs: dict[str, Any] = {name: batch[name].to(model.device) for name in _INPUTS if name in batch}
    if "segments" in batch:
        inputs["attention_mask"] = visible(batch["segments"].to(model.device))
    if "encoding" in batch:
        inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=batch["encoding"].to(model.device, model.dtype))
    return inputs


def visible(segments: Tensor) -> Tensor:
    """Which tokens each token of a pack sees, `[B, 1, L, L]`: earlier ones of the prompt and of its own answer.

    Args:
        segments: `[B, L]`, 0 for the prompt, n for the n-th answer; see `packing.Packs`.
    """
    own = segments.unsqueeze(-2) == segments.unsqueeze(-1)
    return (own | (segments == 0).unsqueeze(-2)).tril().unsqueeze(1)


def in_bfloat16(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Autocast to bfloat16 for a float32 model on a processor that multiplies bfloat16; else nothing."""
    if model.device.type != "cpu" or model.dtype != torch.float32 or not multiplies_bfloat16():
        return nullcontext()
    return torch.autocast("cpu", torch.bfloat16)


def shared_vocabulary(pair: LoadedPair) -> int:
    """The number of tokens that both models have logits for; further ones of either are padding."""
    return min(int(model.config.get_text_config(decoder=True).vocab_size) for model in pair.models)


def rectangle(rows: Sequence[Sequence[int]], fill: int, side: str = "right") -> Tensor:
    """Rows `[B, L]`, padded to the longest."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill, padding_side=side)
