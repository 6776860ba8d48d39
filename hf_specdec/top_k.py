"""Top-k on a CPU: the k-th best score is looked for in the best blocks, since libraries half sort what they are given.

The k best scores lie in the k blocks whose best is best. So one pass of loops finds each block's best, and a library
is asked for the k best of the blocks, and of the scores in those.
"""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor
from transformers import TopKLogitsWarper

LEAST_BLOCK = 4  # scores in a block; with fewer, looking for blocks takes longer than it spares


def keep_top_k(processor: TopKLogitsWarper, scores: Tensor) -> Tensor:
    """What the processor makes of scores `[N, V]`, number for number."""
    worst_kept = kth_best(scores, min(processor.top_k, scores.shape[-1]))
    return scores.masked_fill(scores < worst_kept, processor.filter_value)


def kth_best(scores: Tensor, k: int) -> Tensor:
    """The k-th highest of each row of `[N, V]`, ties counted one by one; `[N, 1]`."""
    rows, width = scores.shape
    block = 2 ** round(log2(width / k) / 2)  # about as many blocks as there are scores in k of them
    if block < LEAST_BLOCK:
        return scores.topk(k, sorted=False).values.amin(dim=-1, keepdim=True)
    blocks = -(-width // block)
    # Those of a block stand a row apart, so that loops find many blocks' best at a time.
    padded = torch.nn.functional.pad(scores, (0, block * blocks - width), value=-torch.inf).view(rows, block, blocks)
    best = padded.amax(dim=1).topk(k, sorted=False).indices
    candidates = padded.gather(2, best.unsqueeze(1).expand(-1, block, -1)).flatten(1)
    return candidates.topk(k, sorted=False).values.amin(dim=-1, keepdim=True)
