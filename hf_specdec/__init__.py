"""Speculative decoding and BiLD under `model.generate(assistant_model=...)` of Hugging Face transformers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_specdec.config import SpeculationConfig
    from hf_specdec.drafting.suffix_memory import SuffixMemory
    from hf_specdec.generation import SpeculativeDecoding, last_speculation
    from hf_specdec.gguf.loading import load_gguf
    from hf_specdec.models.better_transformer import to_better_transformer
    from hf_specdec.models.eagle_draft import Eagle3Draft
    from hf_specdec.models.trimmed_head import TrimmedDraft, frequent_tokens, trim_draft_head
    from hf_specdec.plugin import disable, enable
    from hf_specdec.prepared.engine_store import release
    from hf_specdec.rules.round_statistics import Round, SpeculationStats

__version__ = "0.1.0"

# Imported on first use, so that importing `hf_specdec.config` does not import torch, nor the package any model's code.
_PLACES = {
    "Eagle3Draft": "models.eagle_draft",
    "Round": "rules.round_statistics",
    "SpeculationConfig": "config",
    "SpeculationStats": "rules.round_statistics",
    "SpeculativeDecoding": "generation",
    "SuffixMemory": "drafting.suffix_memory",
    "TrimmedDraft": "models.trimmed_head",
    "disable": "plugin",
    "enable": "plugin",
    "frequent_tokens": "models.trimmed_head",
    "last_speculation": "generation",
    "load_gguf": "gguf.loading",
    "release": "prepared.engine_store",
    "to_better_transformer": "models.better_transformer",
    "trim_draft_head": "models.trimmed_head",
}

__all__ = [
    "Eagle3Draft",
    "Round",
    "SpeculationConfig",
    "SpeculationStats",
    "SpeculativeDecoding",
    "SuffixMemory",
    "TrimmedDraft",
    "__version__",
    "disable",
    "enable",
    "frequent_tokens",
    "last_speculation",
    "load_gguf",
    "release",
    "to_better_transformer",
    "trim_draft_head",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
