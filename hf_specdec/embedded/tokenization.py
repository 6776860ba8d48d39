"""The byte-level BPE tokenizer that all embedded models share."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_specdec.embedded.corpus.examples import SUBTASKS, generate
from hf_specdec.embedded.corpus.prompts import ASSISTANT, BOS, CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS, USER

VOCAB_SIZE = 2048


def _texts(seed: int, n: int) -> Iterator[str]:
    rng = Random(f"tokenizer/{seed}")
    for i in range(n):
        example = generate(SUBTASKS[i % len(SUBTASKS)], "train", rng)
        yield from example.turns
        yield from example.references


def train_tokenizer(seed: int, n_examples: int = 4000) -> PreTrainedTokenizerFast:
    """Train BPE on training examples; every digit is a separate token, so that the models can learn sums.

    If the corpus yields too few merges, the vocabulary is smaller than `VOCAB_SIZE`. The models' embeddings have
    `VOCAB_SIZE` rows in any case.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(seed, n_examples), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT],
        padding_side="left",
        model_max_length=2048,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
