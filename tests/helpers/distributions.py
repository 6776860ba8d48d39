"""Distributions over whole outputs: exact ones by enumeration, and the odds that samples come from them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, set_seed

from helpers.models import PAD
from hf_specdec import SpeculativeDecoding

VOCABULARY = 5
NEW_TOKENS = 3
FALSE_FAILURE = 1e-6


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
