"""Distributions over whole outputs: exact ones by enumeration, and the odds that samples come from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor, set_seed
from transformers.generation import logits_process as host

from helpers.models import EOS, PAD
from hf_specdec import SpeculativeDecoding

VOCABULARY = 5
NEW_TOKENS = 3
ROWS = 2000
FALSE_FAILURE = 1e-6


def prompt_batch(length: int, padding: int) -> tuple[Tensor, Tensor]:
    """`ROWS` times the same prompt behind `padding` pads."""
    text = torch.tensor([2, 3, 4, 2, 4, 3])[:length]
    ids = torch.cat([torch.full((padding,), PAD), text]).expand(ROWS, -1)
    return ids, (torch.arange(ids.shape[1]) >= padding).long().expand(ROWS, -1)


def warpers(settings: dict[str, Any], padding: int) -> LogitsProcessorList:
    """The processors that `generate` builds from these settings, in its order; it does not penalise padding."""
    makers = {
        "repetition_penalty": partial(RepetitionPenaltyLogitsProcessor, prompt_ignore_length=padding),
        "temperature": host.TemperatureLogitsWarper,
        "top_k": host.TopKLogitsWarper,
        "top_p": host.TopPLogitsWarper,
    }
    return LogitsProcessorList(make(settings[name]) for name, make in makers.items() if name in settings)


@torch.no_grad()
def exact(target: PreTrainedModel, ids: Tensor, mask: Tensor, settings: dict[str, Any]) -> dict[tuple, float]:
    """The target's distribution over whole outputs, padded after EOS, by teacher forcing every prefix."""
    finished: dict[tuple, float] = {}
    open_prefixes: dict[tuple, float] = {(): 1.0}
    processors = warpers(settings, int((mask[0] == 0).sum()))
    for _ in range(NEW_TOKENS):
        prefixes = list(open_prefixes)
        texts = torch.cat(
            [ids[:1].expand(len(prefixes), -1), torch.tensor(prefixes, dtype=torch.long).view(len(prefixes), -1)], dim=1
        )
        grown = torch.ones(len(prefixes), texts.shape[1] - ids.shape[1], dtype=torch.long)
        masks = torch.cat([mask[:1].expand(len(prefixes), -1), grown], dim=1)
        positions = (masks.cumsum(-1) - 1).clamp(min=0)
        logits = target(texts, attention_mask=masks, position_ids=positions).logits[:, -1].float()
        probs = processors(texts, logits).softmax(-1)
        grown_prefixes = {
            (*prefix, token): open_prefixes[prefix] * probs[i, token].item()
            for i, prefix in enumerate(prefixes)
            for token in range(VOCABULARY)
            if probs[i, token] > 0
        }
        finished |= {p: w for p, w in grown_prefixes.items() if p[-1] == EOS}
        open_prefixes = {p: w for p, w in grown_prefixes.items() if p[-1] != EOS}
    outputs = {**finished, **open_prefixes}
    return {(*prefix, *[PAD] * (NEW_TOKENS - len(prefix))): weight for prefix, weight in outputs.items()}


@torch.no_grad()
def replayed(
    target: PreTrainedModel, prompt: Tensor, make: Callable[[PreTrainedModel], Any], new_tokens: int = NEW_TOKENS
) -> dict[tuple, float]:
    """The target's distribution over whole outputs after a prompt `[1, n]`, padded after EOS.

    Each output has a processor of its own, which sees it from its first token on.
    """
    finished: dict[tuple, float] = {}
    prefixes: dict[tuple, float] = {(): 1.0}
    while prefixes:
        prefix, weight = prefixes.popitem()
        if len(prefix) == new_tokens or target.generation_config.eos_token_id in prefix:
            finished[(*prefix, *[PAD] * (new_tokens - len(prefix)))] = weight
            continue
        text = torch.cat([prompt, torch.tensor([prefix], dtype=torch.long)], dim=1)
        logits, processor = target(text).logits.float(), make(target)
        for length in range(prompt.shape[1], text.shape[1] + 1):
            scores = processor(text[:, :length], logits[:, length - 1].clone())
        probs = scores.double().softmax(-1)[0].tolist()
        prefixes |= {(*prefix, token): weight * p for token, p in enumerate(probs) if p > 0}
    return finished


def sampled(
    pair: tuple[PreTrainedModel, PreTrainedModel],
    prompt: Tensor,
    make: Callable[[PreTrainedModel], Any],
    rows: int,
    calls: int,
    new_tokens: int = NEW_TOKENS,
    **settings: Any,
) -> Tensor:
    """`[calls, rows, new_tokens]`: outputs after a prompt `[1, n]`; each call has a processor of its own."""
    decoding = SpeculativeDecoding(pair[1], **settings)
    set_seed(7)
    found = []
    for _ in range(calls):
        tokens = pair[0].generate(
            prompt.expand(rows, -1),
            attention_mask=torch.ones(rows, prompt.shape[1], dtype=torch.long),
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            logits_processor=LogitsProcessorList([make(pair[0])]),
            custom_generate=decoding,
        )[:, prompt.shape[1] :]
        padding = pair[0].generation_config.pad_token_id
        found.append(torch.nn.functional.pad(tokens, (0, new_tokens - tokens.shape[1]), value=padding))
    return torch.stack(found)


def chi_square_odds(counts: Counter, expected: dict[tuple, float], samples: int) -> float:
    """The probability of deviations at least as large, small cells pooled; 0 where the impossible occurred."""
    if any(output not in expected for output in counts):
        return 0.0
    cells = [(counts[output], weight * samples) for output, weight in expected.items()]
    large = [(seen, mean) for seen, mean in cells if mean >= 5]
    small = [(seen, mean) for seen, mean in cells if mean < 5]
    pooled = (sum(seen for seen, _ in small), sum(mean for _, mean in small))
    if pooled[1] >= 5:
        large.append(pooled)
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in large)
    half = torch.tensor([(len(large) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def sample(
    pair: tuple[PreTrainedModel, PreTrainedModel],
    ids: Tensor,
    mask: Tensor,
    decoding: SpeculativeDecoding | None,
    **kw: Any,
) -> Tensor:
    """`ROWS` sampled outputs `[ROWS, NEW_TOKENS]`, plain without a decoding."""
    settings = {"do_sample": True, "max_new_tokens": NEW_TOKENS, "top_k": 0, **kw}
    outputs = pair[0].generate(input_ids=ids, attention_mask=mask, custom_generate=decoding, **settings)[
        :, ids.shape[1] :
    ]
    return torch.nn.functional.pad(outputs, (0, NEW_TOKENS - outputs.shape[1]), value=PAD)


def odds(
    pair: tuple[PreTrainedModel, PreTrainedModel], decoding: SpeculativeDecoding | None, **settings: Any
) -> list[float]:
    """The odds of a ragged batch's outputs: half of its rows have a short, padded prompt, half a long one."""
    long_ids, long_mask = prompt_batch(6, 0)
    short_ids, short_mask = prompt_batch(3, 3)
    half = ROWS // 2
    ids = torch.stack([long_ids[:half], short_ids[:half]], dim=1).flatten(0, 1)
    mask = torch.stack([long_mask[:half], short_mask[:half]], dim=1).flatten(0, 1)
    set_seed(11)
    outputs = sample(pair, ids, mask, decoding, **settings).tolist()
    return [
        chi_square_odds(Counter(map(tuple, outputs[kind::2])), exact(pair[0], ids[kind:], mask[kind:], settings), half)
        for kind in (0, 1)
    ]
