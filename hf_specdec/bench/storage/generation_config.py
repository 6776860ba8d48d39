"""A `generation_config.json` with which a model speculates wherever it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from hf_specdec.bench.storage.results import write_bytes

NAME = GENERATION_CONFIG_NAME


def save(model: PreTrainedModel, keywords: Mapping[str, Any], path: Path) -> None:
    """Writes the model's own configuration with `keywords` of generate() added; the model stays as it is.

    Raises `BenchError` where it can't be written.
    """
    # A new object: transformers drops what was added to one that it derived from the model's configuration.
    own = {name: value for name, value in model.generation_config.to_dict().items() if not name.startswith("_")}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, GenerationConfig(**{**own, **keywords}).to_json_string().encode())
