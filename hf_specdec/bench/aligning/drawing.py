"""Draws tokens for texts that a target writes, without `torch.multinomial`.

On a CPU, that goes through the whole vocabulary for each row. For 16 rows of Gemma 3's 262,144 tokens, to find the most
likely tokens and draw one takes 96 ms on two cores of an Intel Xeon with AMX, and 12 ms as here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.bench.models.loading import sampling_settings
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
    """Plain generate() that draws from the same distribution, faster, if temperature and top-k alone decide on it."""
    temperature, top_k = settings.temperature, settings.top_k
    plain = contender.method.kind == "plain" and settings.sampling and settings.top_p == 1.0
    others = sampling_settings(contender.pair.target).keys() - {"temperature", "top_k", "top_p"}
    if not plain or not top_k or temperature is None or others:
        return contender, settings
    draw = DrawnToken(top_k, temperature)
    models = {**contender.models, "logits_processor": LogitsProcessorList([draw])}
    return replace(contender, models=models), replace(settings, do_sample=False)
