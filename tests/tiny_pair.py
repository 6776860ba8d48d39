"""Tiny random pairs on disk, for tests of the benchmark: a target and a noisy copy of it as its draft."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_specdec import embedded

VOCABULARY = 320


def save_pair(folder: Path, encoder_decoder: bool = False) -> tuple[Path, Path]:
    """Saves a pair with its tokenizer; returns the folders of target and draft. Context: 200 tokens for
    LLaMA.
    """
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    target = _t5() if encoder_decoder else _llama()
    draft = type(target)(target.config)
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        for parameter in draft.parameters():
            # Enough for an acceptance that is neither 0 nor 1.
            parameter.add_(torch.randn_like(parameter) * 0.2 * parameter.std())
    paths = folder / "target", folder / "draft"
    for model, path in zip((target, draft), paths, strict=True):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return paths


def _tokenizer() -> PreTrainedTokenizerFast:
    texts = [
        text
        for subtask in embedded.SUBTASKS
        for example in embedded.examples(subtask, n=3)
        for text in (*example.turns, *example.references)
    ]
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def _llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=200,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def _t5() -> PreTrainedModel:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        initializer_factor=1.0,
        eos_token_id=1,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)
