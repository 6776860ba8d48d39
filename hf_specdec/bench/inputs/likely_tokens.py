"""The tokens that a draft with a trimmed head may propose: those that the prompts' answers are likely to hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import hf_specdec
from hf_specdec import embedded
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models import synthetic
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.settings import BenchError

_TEXTS = 100  # of each embedded subtask


def likely_tokens(pair: LoadedPair, count: int, prompts: Sequence[Prompt], following: int, seed: int) -> list[int]:
    """The most frequent tokens of the embedded corpus, of its split `train`, which no prompt is from.

    For a synthetic pair the first `count` tokens on its cycle behind the prompts' ends, `following` of each at least:
    acceptance stays as imposed.

    Raises:
        BenchError: `count` is larger than the vocabulary, or smaller than what is always included.
    """
    assert pair.draft is not None and pair.draft_tokenizer is not None
    vocabulary = pair.draft.config.get_text_config(decoder=True).vocab_size
    if count > vocabulary:
        raise BenchError(f"--draft_vocabulary: {count} exceeds the draft's {vocabulary} tokens; give fewer")
    if pair.synthetic is not None:
        return _on_cycle(vocabulary, count, {prompt.token_ids[-1] for prompt in prompts}, following, seed)
    examples = chain.from_iterable(embedded.examples(subtask, split="train", n=_TEXTS) for subtask in embedded.SUBTASKS)
    texts = (text for example in examples for text in (*example.turns, *example.references))
    try:
        return hf_specdec.frequent_tokens(texts, pair.draft_tokenizer, count)
    except ValueError as error:
        raise BenchError(f"--draft_vocabulary: {count} can't be had ({error})") from error


def _on_cycle(vocabulary: int, count: int, ends: set[int], following: int, seed: int) -> list[int]:
    successor = synthetic.cycle(vocabulary, seed).argsort().tolist()
    needed = len(ends) * (1 + following)
    if count < needed:
        raise BenchError(
            f"--draft_vocabulary: {count} tokens don't cover what follows {len(ends)} prompts; give {needed} or more"
        )
    found, last = dict.fromkeys(ends), list(ends)
    while len(found) < count:
        last = [successor[token] for token in last]
        found |= dict.fromkeys(last)
    return list(found)[:count]
