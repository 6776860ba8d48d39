"""Speculative decoding and BiLD under `model.generate(assistant_model=...)` of Hugging Face transformers."""

from hf_specdec.config import SpeculationConfig
from hf_specdec.generation import SpeculativeDecoding, last_speculation
from hf_specdec.plugin import disable, enable
from hf_specdec.stats import Round, SpeculationStats

__version__ = "0.1.0"

__all__ = [
    "Round",
    "SpeculationConfig",
    "SpeculationStats",
    "SpeculativeDecoding",
    "__version__",
    "disable",
    "enable",
    "last_speculation",
]
