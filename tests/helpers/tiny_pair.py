"""Tiny random pairs on disk, with a tokenizer: what the benchmark and its script load in tests."""

from pathlib import Path

import tokenizers
from tokenizers import pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from helpers import models
from hf_specdec import embedded

VOCABULARY = 320
CONTEXT = 160


def save_pair(folder: Path, encoder_decoder: bool = False) -> tuple[Path, Path]:
    """Saves a pair with its tokenizer; returns the folders of target and draft. LLaMA's context: `CONTEXT`."""
    words = tokenizer()
    if encoder_decoder:
        target = models.t5(vocab_size=VOCABULARY)
    else:
        target = models.llama(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    paths = folder / "target", folder / "draft"
    for model, path in zip((target, models.noisy(target)), paths, strict=True):
        model.save_pretrained(path)
        words.save_pretrained(path)
    return paths


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCABULARY` tokens, `</s>` the second."""
    texts = [
        text
        for subtask in embedded.SUBTASKS
        for example in embedded.examples(subtask, n=3)
        for text in (*example.turns, *example.references)
    ]
    core = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
