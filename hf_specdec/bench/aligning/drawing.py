"""Draws tokens for texts that a target writes, without `torch.multinomial`.

On a CPU, that goes through the whole vocabulary for each row: with Gemma 3's 262,144 tokens, two thirds of the time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.bench.running.methods import Contender
from hf_specdec.bench.settings import Settings

# How texts are sampled unless the user samples; top-p would sort the whole vocabulary at every step.
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 1.0}


class DrawnToken(LogitsProcessor):
    """Makes greedy decoding draw: raises one token's score, drawn from the most likely ones (Gumbel-max).

    Args:
        top_k, temperature: as in `generate`.
    """

    def __init__(self, top_k: int, temperature: float) -> None:
        self.top_k, self.temperature = top_k, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` with a drawn token's at infinity."""
        likely, tokens = scores.topk(min(self.top_k, scores.shape[-1]))
        gumbel = -torch.empty_like(likely).exponential_().log()
        drawn = (likely / self.temperature + gumbel).argmax(dim=-1, keepdim=True)
        return scores.scatter(-1, tokens.gather(-1, drawn), torch.inf)


def drawing(contender: Contender, settings: Settings) -> tuple[Contender, Settings]:
    """Plain generate() that draws from the same distribution, faster, if the settings name only a top-k."""
    if contender.method.kind != "plain" or not settings.sampling or not settings.top_k or settings.top_p != 1.0:
        return contender, settings
    draw = DrawnToken(settings.top_k, 1.0 if settings.temperature is None else settings.temperature)
    models = {**contender.models, "logits_processor": LogitsProcessorList([draw])}
    return replace(contender, models=models), replace(settings, do_sample=False)
