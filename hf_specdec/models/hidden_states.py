"""The target's hidden states, for drafters that read them: handed out pass by pass, kept until they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOST_PASSES = 64  # that are kept apart


class HiddenStates:
    """What a runner's passes leave of some layers' hidden states, by row and place in the text.

    A later pass over a place replaces what an earlier one left there, so rejected drafts need no rolling back.

    Args:
        layers: the layers, as indices of `hidden_states` in the outputs of transformers' models: -1 is the last, as
            the head reads it; 0 is before the first.

    Attributes:
        first: the first place of each row that was handed out; None before the first pass.
        runner: what hands them out.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = list(layers)
        self._passes: list[tuple[list[int], Tensor]] = []
        self._kept: list[int] = []
        self._ends: list[int] = []
        self.first: list[int] | None = None
        self.runner: Any = None

    def add(self, ends: Sequence[int], states: Tensor) -> None:
        """Take over the states `[B, k, H]` of a pass after which each row has read its entry of `ends` tokens."""
        places = [end - states.shape[1] for end in ends]
        if self.first is None:
            self.first = self._kept = places
        self._passes.append((places, states))
        self._ends = list(ends)
        if len(self._passes) > MOST_PASSES:
            self.drop(self._kept)

    def of(self, places: Sequence[int], width: int) -> Tensor:
        """`[B, width, H]`: the states from each row's entry of `places` on; arbitrary where none were handed out."""
        wanted = torch.tensor(places).unsqueeze(1) + torch.arange(width)
        found, offset = torch.zeros_like(wanted), 0
        for first, states in self._passes:
            lanes = wanted - torch.tensor(first).unsqueeze(1)
            found = torch.where((lanes >= 0) & (lanes < states.shape[1]), lanes + offset, found)
            offset += states.shape[1]
        if len(self._passes) == 1:
            (everything,) = (states for _, states in self._passes)
        else:
            everything = torch.cat([states for _, states in self._passes], dim=1)
        index = found.to(everything.device, non_blocking=everything.is_cuda)
        return everything.gather(1, index.unsqueeze(2).expand(-1, -1, everything.shape[2]))

    def drop(self, before: Sequence[int]) -> None:
        """Forget the states before each row's entry of `before`."""
        width = max(end - kept for end, kept in zip(self._ends, before, strict=True))
        self._passes = [(list(before), self.of(before, width))] if width > 0 else []
        self._kept = list(before)


def states_of(outputs: Any, layers: Sequence[int], count: int) -> Tensor:
    """`[m, count, H]`: the layers' states of a pass's last tokens, side by side.

    Fewer where a model computes its last layers only for tokens whose logits are wanted.
    """
    states = [outputs.hidden_states[layer][:, -count:] for layer in layers]
    return states[0] if len(states) == 1 else torch.cat(states, dim=-1)
