"""Small trained models and their corpus, for measuring speculation offline; decodes nothing.

Importing this needs neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

from hf_specdec.embedded.corpus.examples import SPLITS, SUBTASKS, Example, examples, split_of
from hf_specdec.embedded.corpus.prompts import encoder_text, prompt_ids, render_prompt

MODELS_DIR = Path(__file__).resolve().parent / "models"
_NAMES = ("target", "draft-small", "draft", "draft-large", "t5-target", "t5-draft")

__all__ = [
    "MODELS_DIR", "SPLITS", "SUBTASKS", "Example", "encoder_text", "examples", "model_path",
    "names", "prompt_ids", "render_prompt", "split_of",
]  # fmt: skip


def names() -> tuple[str, ...]:
    """The names of the models in the package; `draft` is the target's default draft."""
    return _NAMES


def model_path(name: str) -> Path:
    """The folder of a model of the package, for `from_pretrained`.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in _NAMES:
        raise ValueError(f"unknown embedded model {name!r}; choose one of {', '.join(_NAMES)}")
    return MODELS_DIR / name
