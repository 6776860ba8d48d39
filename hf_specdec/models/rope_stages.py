"""Stages: ranges of text lengths in which a model's passes have the same rotary frequencies.

A pass takes the frequencies of its longest position. LongRoPE has one set up to `original_max_position_embeddings`
tokens and another beyond, dynamic NTK one for each length from `max_position_embeddings` on. In plain `generate` all
rows of a batch are equally long, padding included, so the row with the least padding decides for all of them, even
after it has ended. Rows that advance unevenly get the same frequencies if they enter a stage together, and no pass
holds drafts of the next stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.models.cache_names import CACHE_NAME
from hf_specdec.models.traits import has_default_inputs


@dataclass(frozen=True)
class Stages:
    """The stages of a call.

    Args:
        ends: the longest text of each stage but the last, in tokens of a row with its padding, ascending.
        grows: whether frequencies differ for every length in the last stage.
        longest_row: the row with the highest positions, which decides for all in plain `generate`.
        offset: the position of that row's last token minus the text's length.
    """

    ends: tuple[int, ...]
    grows: bool
    longest_row: int
    offset: int

    def going(self, rows: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], float]:
        """Those of `rows` that take part in the next round, and the most drafts that it can hold.

        Rows at the end of their stage wait for the others.

        Args:
            lengths: `[B]`, the number of tokens in each row.
        """
        shortest = min(lengths[row] for row in rows)
        end = next((end for end in self.ends if end >= shortest), math.inf)
        going = [row for row in rows if lengths[row] <= end]
        if end == math.inf:
            return going, 0 if self.grows else math.inf
        return going, end - max(lengths[row] for row in going)

    def agree(self, length: int, longer: int) -> bool:
        """Whether texts of both lengths have the same frequencies."""
        if self.grows and longer > self.ends[-1]:
            return length == longer
        return not any(length <= end < longer for end in self.ends)

    def last_position(self, length: int) -> int:
        """The highest position of plain `generate`'s pass over texts of a length."""
        return length + self.offset


def stages_of(
    model: PreTrainedModel, positions: Tensor | None, prompt_length: int, hidden: int, capacity: int
) -> Stages | None:
    """The stages of a call; None if frequencies are the same at every length that it can reach.

    Args:
        positions: `[..., B or 1, N]`, of the tokens in a given cache, of the prompts and beyond; None if the model
            counts tokens.
        prompt_length: P.
        hidden: tokens in a given cache that precede the prompts; the lengths of stages don't count them.
        capacity: the most tokens of a row.
    """
    limits, grows = _limits(model)
    if not limits:
        return None
    column, row = prompt_length + hidden - 1, 0
    last = column
    if positions is not None:
        by_row = positions[..., column].reshape(-1, positions.shape[-2]).amax(dim=0)
        row, last = int(by_row.argmax()), int(by_row.max())
    offset = last - prompt_length
    ends = tuple(sorted({limit - 1 - offset for limit in limits}))
    return Stages(ends, grows, row, offset) if capacity > ends[0] else None


def check_dropped_cache(model: PreTrainedModel, cache: Any, prompt_length: int, hidden: int, max_length: int) -> None:
    """Refuse a call in which the model drops its cache and then doesn't read the whole text.

    LongRoPE's models drop it when a text outgrows `original_max_position_embeddings`; some then read only the last
    token.

    Args:
        model: the target.
        cache: the call's cache before the first pass, or None.
        prompt_length: P.
        hidden: tokens in the cache that precede the prompts.
        max_length: the most tokens of a row.

    Raises:
        ValueError: names the model, where it drops the cache, and the way out.
    """
    limit = getattr(model.config, "original_max_position_embeddings", None)
    if cache is None or limit is None or has_default_inputs(model):
        return
    in_prompt = 0 < cache.get_seq_length() <= limit < prompt_length
    in_decoding = not hidden and prompt_length <= limit < max_length - 1
    if not in_prompt and not in_decoding:
        return
    ids = torch.zeros(1, limit + 1, dtype=torch.long, device=model.device)
    inputs = model.prepare_inputs_for_generation(
        ids, next_sequence_length=1, use_cache=True, **{CACHE_NAME: _FilledCache(limit)}
    )
    if inputs.get(CACHE_NAME) is None and (hidden or inputs["input_ids"].shape[1] < ids.shape[1]):
        raise ValueError(
            f"model={type(model).__name__} drops its cache when a text exceeds {limit} tokens "
            "(original_max_position_embeddings), after which plain generate() reads only a part of the text; this one "
            f"has {prompt_length} tokens and may reach {max_length}: end it before (max_length={limit + 1}), pass the "
            "whole of a longer text without a cache, or pass use_cache=False."
        )


class _FilledCache(DynamicCache):
    """An empty cache that reports a given length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def has_fixed_rope(model: PreTrainedModel) -> bool:
    """Whether rotary frequencies are the same at every length; if not, a pass chooses them by reading positions."""
    return not _limits(model)[0]


def _limits(model: PreTrainedModel) -> tuple[list[int], bool]:
    """The longest text of each stage but the last, from position 0, and whether the last stage's frequencies change."""
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    limits, grows = [], False
    for kind in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        name = kind.get("rope_type") or ""
        if name == "longrope":
            limits.append(kind.get("original_max_position_embeddings") or config.max_position_embeddings)
        elif "dynamic" in name:
            # One less: a pass over all of them keeps the frequencies that an earlier, longer text has set.
            limits.append(config.max_position_embeddings - 1)
            grows = True
    return limits, grows
