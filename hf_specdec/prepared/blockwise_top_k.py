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
    block = 2 ** round(log2(scores.shape[-1] / k) / 2)  # about as many blocks as there are scores in k of them
    candidates = scores if block < LEAST_BLOCK else _in_best_blocks(scores, k, block)
    return candidates.topk(k, sorted=False).values.amin(dim=-1, keepdim=True)


def _in_best_blocks(scores: Tensor, k: int, block: int) -> Tensor:
    """The scores in the k blocks whose best is best, `[N, k * block]`."""
    rows, width = scores.shape
    blocks = -(-width // block)
    # Those of a block stand a row apart, so that loops find many blocks' best at a time.
    padded = torch.nn.functional.pad(scores, (0, block * blocks - width), value=-torch.inf).view(rows, block, blocks)
    best = padded.amax(dim=1).topk(k, sorted=False).indices
    return padded.gather(2, best.unsqueeze(1).expand(-1, block, -1)).flatten(1)
