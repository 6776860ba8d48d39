"""A tokenizer of whole words for the tiny models."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.models import VOCABULARY


def word_tokenizer(size: int = VOCABULARY, order: int = 1) -> PreTrainedTokenizerFast:
    """One word a token: `<pad>`, `</s>`, `abcdef` (`StopStringCriteria` asks for it), then `w3`, `w4`, …

    Args:
        size: tokens in all.
        order: 1 numbers the words upwards, -1 downwards, so that the same words have other ids.
    """
    words = [f"w{number}" for number in range(3, size)][::order]
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "abcdef", *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<pad>")
