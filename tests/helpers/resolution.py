"""How far two outputs' scores may differ by rounding alone, in a given precision."""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel


def resolution(model: PreTrainedModel, logits: Tensor) -> float:
    """The margin between two logits below which the model's arithmetic doesn't tell them apart.

    A pass over several tokens and passes over single ones add the same numbers up in other orders, so each rounds
    differently. A decoder layer rounds its residual stream about 6 times (attention, its projection and sum, MLP,
    its projection and sum), the final norm and the head twice: r = 6 layers + 2 roundings. Types narrower than
    float32 add up in float32 and round the sum; from float32 on a sum rounds inside too, blockwise, about
    log2(width) times more. Each error is at most eps / 2 of the numbers' size, for which the largest logit stands,
    and eps / (2 sqrt(3)) in the root mean square. Independent errors grow as the square root of their number n,
    which is 4 r (two logits in two runs), and 4 standard deviations are allowed for.

    int8 and int4 weights are the same numbers in both runs, so their own coarseness doesn't count: the type in
    which they are multiplied does.

    Args:
        logits: `[..., V]`, of the position in question.

    Returns:
        4 sqrt(n) eps / (2 sqrt(3)) max |logit|, in logits (nats).
    """
    config = model.config.get_text_config(decoder=True)
    eps = torch.finfo(model.dtype).eps
    sums = 1 + math.log2(config.hidden_size) if eps <= torch.finfo(torch.float32).eps else 1
    n = 4 * (6 * config.num_hidden_layers + 2) * sums
    return 4 * math.sqrt(n) * eps / (2 * math.sqrt(3)) * float(logits.abs().max())
