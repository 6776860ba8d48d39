"""The settings in the draft's own `generation_config`, as transformers' assisted generation reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.config import SpeculationConfig
from hf_specdec.host.caller import warn_caller
from hf_specdec.models.traits import drafting_model, wrapped_model


def with_settings_of(draft: PreTrainedModel, config: SpeculationConfig) -> SpeculationConfig:
    """Fill a call's open settings from the draft's `generation_config`, or from a DFlash draft's block size."""
    inner: Any = wrapped_model(drafting_model(draft))
    if config.drafter == "dflash":
        length = config.num_assistant_tokens
        return replace(config, num_assistant_tokens=inner.config.block_size - 1 if length is None else length)
    own = inner.generation_config
    names = "num_assistant_tokens", "assistant_confidence_threshold"
    stored = {name: getattr(own, name, None) for name in names if getattr(config, name) is None}
    schedule = getattr(own, "num_assistant_tokens_schedule", None)
    if "num_assistant_tokens" in stored and schedule not in (None, "constant"):
        warn_caller(
            f"num_assistant_tokens_schedule={schedule!r} in the generation_config of assistant_model="
            f"{type(draft).__name__} is ignored: pass num_assistant_tokens='auto' for adaptive lengths."
        )
    return replace(config, **{name: value for name, value in stored.items() if value is not None})
