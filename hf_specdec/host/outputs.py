"""The outputs of `generate(return_dict_in_generate=True)`, with the call's statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specdec.rules.round_statistics import SpeculationStats


class _Speculated:
    """Adds the statistics as `output.speculation` and `output["speculation"]`.

    Iteration leaves them out, because code that iterates over an output (Whisper's `generate`) expects tensors only.
    """

    speculation: SpeculationStats | None = None

    def __getitem__(self, key: Any) -> Any:
        return self.speculation if key == "speculation" else super().__getitem__(key)  # type: ignore[misc]


@dataclass
class SpeculativeDecoderOnlyOutput(_Speculated, GenerateDecoderOnlyOutput):
    """transformers' output of a decoder-only model, with `speculation`."""


@dataclass
class SpeculativeEncoderDecoderOutput(_Speculated, GenerateEncoderDecoderOutput):
    """transformers' output of an encoder-decoder model, with `speculation`."""
