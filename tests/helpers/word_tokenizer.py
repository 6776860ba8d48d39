"""Tokenizers for the tiny models: of whole words, and of pieces of a text without spaces."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
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


def piece_tokenizer(pieces: Sequence[str], pad: str = "<pad>", end: str = "</s>") -> PreTrainedTokenizerFast:
    """Writes a text in as few pieces as it can; their ids follow those of `pad` and `end`."""
    scores = [(pad, -9.0), (end, -9.0), *((piece, -1.0) for piece in pieces)]
    core = Tokenizer(models.Unigram(scores, unk_id=0))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, eos_token=end, unk_token=pad)
