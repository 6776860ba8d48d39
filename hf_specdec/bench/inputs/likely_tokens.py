"""The tokens that a draft with a trimmed head may propose: those that are likely in the prompts' answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from tqdm import tqdm

import hf_specdec
from hf_specdec import embedded
from hf_specdec.bench.inputs.prompts import Prompt, context_length, practice_prompts
from hf_specdec.bench.models import synthetic
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.settings import BenchError

_TEXTS = 100  # texts of each embedded subtask
_PROMPT, _ANSWER = 128, 128  # tokens of the practice prompts, and minimum tokens of the target's answers


def likely_tokens(pair: LoadedPair, count: int, prompts: Sequence[Prompt], following: int, seed: int) -> list[int]:
    """The most frequent tokens of the target's own answers to other prompts than these.

    For an embedded pair, those of its training corpus (split `train`). For a synthetic pair, the first `count` tokens
    on its cycle after the prompts' ends, at least `following` for each, so that acceptance stays as imposed.

    Raises:
        BenchError: `count` is larger than the vocabulary, or too small for the tokens that are always included.
    """
    assert pair.draft is not None and pair.draft_tokenizer is not None
    vocabulary = pair.draft.config.get_text_config(decoder=True).vocab_size
    if count > vocabulary:
        raise BenchError(f"--draft_vocabulary: {count} exceeds the draft's {vocabulary} tokens; give fewer")
    if pair.synthetic is not None:
        return _on_cycle(vocabulary, count, {prompt.token_ids[-1] for prompt in prompts}, following, seed)
    if pair.target_name not in embedded.names():
        return _frequent(_answers(pair, max(following, _ANSWER)), pair, count)
    examples = chain.from_iterable(embedded.examples(subtask, split="train", n=_TEXTS) for subtask in embedded.SUBTASKS)
    return _frequent((text for example in examples for text in (*example.turns, *example.references)), pair, count)


def _frequent(texts: Iterable[str | list[int]], pair: LoadedPair, count: int) -> list[int]:
    try:
        return hf_specdec.frequent_tokens(texts, pair.draft_tokenizer, count)
    except ValueError as error:
        raise BenchError(f"--draft_vocabulary: {count} is not possible ({error})") from error


def _answers(pair: LoadedPair, new_tokens: int) -> Iterator[str | list[int]]:
    """Prompts and the target's greedy answers to them, as text if the draft has another tokenizer."""
    same = pair.tokenizer.get_vocab() == pair.draft_tokenizer.get_vocab()  # type: ignore[union-attr]
    room = context_length(pair) or _PROMPT + new_tokens
    length = min(_PROMPT, room // 2)
    new_tokens = min(new_tokens, room - length)
    for prompt in tqdm(practice_prompts(pair, length), desc="answers for --draft_vocabulary", file=sys.stderr):
        ids = torch.tensor([prompt.token_ids], device=pair.target.device)
        options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": pair.tokenizer.pad_token_id}
        output = pair.target.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
        answer = [*prompt.token_ids, *output[1:]] if pair.encoder_decoder else output
        yield answer if same else pair.tokenizer.decode(answer, skip_special_tokens=True)


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
