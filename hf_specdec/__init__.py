"""Speculative decoding and BiLD under `model.generate(assistant_model=...)` of Hugging Face transformers."""

from typing import TYPE_CHECKING, Any

from hf_specdec.config import SpeculationConfig
from hf_specdec.generation import SpeculativeDecoding, last_speculation
from hf_specdec.models.trimmed_head import TrimmedDraft, frequent_tokens, trim_draft_head
from hf_specdec.plugin import disable, enable
from hf_specdec.prepared.engine_store import release
from hf_specdec.rules.round_statistics import Round, SpeculationStats

if TYPE_CHECKING:
    from hf_specdec.models.better_transformer import to_better_transformer

__version__ = "0.1.0"

__all__ = [
    "Round",
    "SpeculationConfig",
    "SpeculationStats",
    "SpeculativeDecoding",
    "TrimmedDraft",
    "__version__",
    "disable",
    "enable",
    "frequent_tokens",
    "last_speculation",
    "release",
    "to_better_transformer",
    "trim_draft_head",
]


def __getattr__(name: str) -> Any:
    """Imports Better Transformer on first use: it brings BLOOM's modelling code with it."""
    if name == "to_better_transformer":
        from hf_specdec.models.better_transformer import to_better_transformer

        return to_better_transformer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
