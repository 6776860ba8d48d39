"""Training batches as a pure function of (seed, step), so that a resumed run sees the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from transformers import PreTrainedTokenizerBase

from hf_specdec.embedded.corpus.examples import SUBTASKS, Example, generate
from hf_specdec.embedded.corpus.prompts import prompt_ids, render_prompt

# The subtasks named again are drawn more often, because they take longer to learn.
_MIX = (*SUBTASKS, "math_reasoning", "grammar correction", "translation")
_GROUP = 4  # batches of T5 whose pairs are drawn together


@dataclass(frozen=True)
class Batch:
    """Tensors of one step. `inputs` are keyword arguments of the model without labels.

    `labels [B, T]` are aligned with the logits; `weights [B, T]` weigh each position's loss.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    weights: torch.Tensor


def _dialogue(
    tokenizer: PreTrainedTokenizerBase, example: Example, prompt_weight: float
) -> tuple[list[int], list[float]]:
    """The token ids of an example with its answers, and the loss weight of each token."""
    texts: list[str] = []
    for turn, reference in enumerate(example.references):
        question = render_prompt(example, turn, example.references)[len("".join(texts)) :]
        texts += [question, reference + tokenizer.eos_token]
    parts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = [token for part in parts for token in part]
    weights = [prompt_weight if i % 2 == 0 else 1.0 for i, part in enumerate(parts) for _ in part]
    return ids, weights


def packed_batch(
    tokenizer: PreTrainedTokenizerBase, rng: Random, rows: int, length: int, mix: Sequence[str], prompt_weight: float
) -> Batch:
    """Rows `[B, length]` of `<bos>` and several examples with answers; half of the rows begin inside an example."""
    packed = []
    for _ in range(rows):
        ids: list[int] = []
        weights: list[float] = []
        begins_inside = rng.random() < 0.5
        few = rng.sample(SUBTASKS, rng.randrange(1, 9)) if rng.random() < 0.3 else mix
        wanted = length + (110 if begins_inside else 0)
        while len(ids) < wanted:
            more, their_weights = _dialogue(tokenizer, generate(rng.choice(few), "train", rng), prompt_weight)
            ids += more
            weights += their_weights
        start = rng.randrange(1, 110) if begins_inside else 0
        packed.append((ids[start : start + length], weights[start : start + length]))
    return _after_bos(tokenizer, packed)


def whole_batch(
    tokenizer: PreTrainedTokenizerBase, rng: Random, rows: int, length: int, mix: Sequence[str], prompt_weight: float
) -> Batch:
    """Rows `[B, length]` of `<bos>` and whole examples only, padded on the right: no answer lacks its text."""
    padded = []
    for _ in range(rows):
        ids: list[int] = []
        weights: list[float] = []
        for _ in range(3 * length // 100):
            more, their_weights = _dialogue(tokenizer, generate(rng.choice(mix), "train", rng), prompt_weight)
            if len(ids) + len(more) <= length:
                ids += more
                weights += their_weights
        rest = length - len(ids)
        padded.append((ids + [tokenizer.pad_token_id] * rest, weights + [0.0] * rest))
    return _after_bos(tokenizer, padded)


def _after_bos(tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[list[int], list[float]]]) -> Batch:
    """Rows of token ids and weights, all `length` long, each after a `<bos>`."""
    tokens = torch.tensor([[tokenizer.bos_token_id, *ids] for ids, _ in rows])
    weights = torch.tensor([weights for _, weights in rows])
    return Batch({"input_ids": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous(), weights)


Pair = tuple[list[int], list[int]]  # what an encoder reads, and the answer


def _pair(tokenizer: PreTrainedTokenizerBase, rng: Random, mix: Sequence[str], length: int | None = None) -> Pair:
    """One question of an example, with solved examples in front of it up to `length` tokens if that is given."""
    example = generate(rng.choice(mix), "train", rng)
    turn = rng.randrange(len(example.turns))
    source = prompt_ids(tokenizer, example, length, encoder=True, turn=turn, previous_answers=example.references)
    answer = tokenizer(example.references[turn] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    return source, answer


@lru_cache(maxsize=1)
def _pairs_of_similar_length(
    tokenizer: PreTrainedTokenizerBase, seed: int, group: int, count: int, mix: Sequence[str]
) -> list[list[Pair]]:
    """`_GROUP` lists of `count` pairs, drawn together and sorted by length, so that batches need little padding."""
    rng = Random(f"pairs/{seed}/{group}")
    pairs = [_pair(tokenizer, rng, mix) for _ in range(_GROUP * count)]
    pairs.sort(key=lambda pair: len(pair[0]) + 2 * len(pair[1]))
    lists = [pairs[begin : begin + count] for begin in range(0, len(pairs), count)]
    rng.shuffle(lists)
    return lists


def pair_batch(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]) -> Batch:
    """Encoder inputs `[B, S]`, padded on the left, and answers `[B, T]`, padded on the right."""
    pad = tokenizer.pad_token_id
    width, height = (max(len(pair[side]) for pair in pairs) for side in (0, 1))
    source_ids = torch.tensor([[pad] * (width - len(source)) + source for source, _ in pairs])
    labels = torch.tensor([answer + [pad] * (height - len(answer)) for _, answer in pairs])
    shifted = torch.cat([torch.full((len(pairs), 1), pad), labels[:, :-1]], dim=1)
    inputs = {"input_ids": source_ids, "attention_mask": (source_ids != pad).long(), "decoder_input_ids": shifted}
    return Batch(inputs, labels, (labels != pad).float())


def batch_for_step(
    tokenizer: PreTrainedTokenizerBase,
    *,
    encoder_decoder: bool,
    rows: int,
    seed: int,
    step: int,
    emphasis: Sequence[str] = (),
    prompt_weight: float = 0.1,
    whole: bool = False,
    few_shot: bool = False,
) -> Batch:
    """The batch of a step, about `rows` x 256 tokens.

    Decoder-only models get rows of 256 tokens, of 512 at every fourth step, of 1024 at every 32nd. T5 gets
    `3 * rows` questions; with `few_shot`, every fourth batch has fewer, which follow solved examples.
    """
    rng = Random(f"batch/{seed}/{step}")
    mix = (*_MIX, *emphasis, *emphasis)
    if encoder_decoder:
        if few_shot and step % _GROUP == _GROUP - 1:
            length = rng.choice((192, 256, 384, 512))
            pairs = [_pair(tokenizer, rng, mix, length) for _ in range(max(1, rows * 256 // length))]
        else:
            pairs = _pairs_of_similar_length(tokenizer, seed, step // _GROUP, 3 * rows, mix)[step % _GROUP]
        return pair_batch(tokenizer, pairs)
    length = 1024 if step % 32 == 31 else 512 if step % 4 == 3 else 256
    make = whole_batch if whole else packed_batch
    return make(tokenizer, rng, max(1, rows * 256 // length), length, mix, prompt_weight)
