"""Tiny random models, and noisy copies of them as their drafts: acceptance is neither 0 nor 1."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

VOCABULARY = 64
PAD, EOS = 0, 1


def llama(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A decoder-only target in float64, where near-ties between passes of different width don't flip."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": None,
        "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).double().eval()


def t5(seed: int = 2, **overrides: Any) -> PreTrainedModel:
    """An encoder-decoder target in float64, with a head of its own: a tied one only repeats its last token."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
        "initializer_factor": 1.0, "tie_word_embeddings": False, "eos_token_id": EOS, "pad_token_id": PAD,
        "decoder_start_token_id": PAD,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(**{**settings, **overrides}))
    model.lm_head = torch.nn.Linear(model.config.d_model, model.config.vocab_size, bias=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0 if "shared" in name else 0.3)
    return model.double().eval()


def noisy(target: PreTrainedModel, noise: float = 0.04, seed: int = 1) -> PreTrainedModel:
    """A copy of the target whose parameters are perturbed in proportion to their spread."""
    draft = deepcopy(target)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += torch.randn_like(parameter) * parameter.std() * noise
    return draft


def prompts(rows: int, length: int = 9, seed: int = 2, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Random prompts, every row after the first padded on the left by some more tokens."""
    torch.manual_seed(seed)
    ids = torch.randint(2, vocabulary, (rows, length))
    mask = torch.ones_like(ids)
    for row in range(rows):
        ids[row, : row % (length - 2)] = PAD
        mask[row, : row % (length - 2)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def encoder_prompts(rows: int, length: int = 7, seed: int = 3) -> dict[str, Tensor]:
    """Random encoder inputs, every row after the first padded on the right."""
    return {name: tensor.flip(1) for name, tensor in prompts(rows, length, seed).items()}


class Passes:
    """Counts a model's forward passes while in force."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.count = 0
        self._handle = model.register_forward_pre_hook(self._seen)

    def _seen(self, *_: Any) -> None:
        self.count += 1

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def resized(model: PreTrainedModel, vocabulary: int) -> PreTrainedModel:
    """A copy whose vocabulary is cut or padded with random tokens."""
    copy = deepcopy(model)
    torch.manual_seed(9)
    copy.resize_token_embeddings(vocabulary, mean_resizing=False)
    return copy
