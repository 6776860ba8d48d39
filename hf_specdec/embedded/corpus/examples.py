"""Examples of the eight subtasks, and the split that keeps some of them out of training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from hf_specdec.embedded.corpus import facts, reasoning, writing

_GENERATORS: dict[str, Callable[[Random], facts.Dialogue]] = {
    "multi-turn": facts.multi_turn,
    "translation": writing.translation,
    "summarization": writing.summarization,
    "qa": facts.qa,
    "math_reasoning": reasoning.math_reasoning,
    "rag": facts.rag,
    "law analytics": reasoning.law_analytics,
    "grammar correction": writing.grammar_correction,
}
SUBTASKS: tuple[str, ...] = tuple(_GENERATORS)
SPLITS: tuple[str, ...] = ("train", "heldout")

_HELDOUT_SHARE = 8  # one prompt in eight is held out


@dataclass(frozen=True)
class Example:
    """A dialogue of one subtask: the user's turns and the right answer to each."""

    subtask: str
    turns: tuple[str, ...]
    references: tuple[str, ...]


def split_of(example: Example) -> str:
    """`"heldout"` or `"train"`, decided by a hash of the first user turn.

    The hash is the same in every process, so no prompt is in both splits, whatever seed generated it.
    """
    digest = hashlib.blake2b(example.turns[0].encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % _HELDOUT_SHARE == 0 else "train"


def generate(subtask: str, split: str, rng: Random) -> Example:
    """The next example that `rng` yields for a split."""
    make = _GENERATORS[subtask]
    while True:
        example = Example(subtask, *make(rng))
        if split_of(example) == split:
            return example


def examples(subtask: str, split: str = "heldout", n: int = 50, seed: int = 0) -> list[Example]:
    """`n` different examples of a subtask; the same arguments give the same examples.

    Raises:
        ValueError: the subtask or split is unknown, or `n` is negative.
    """
    if subtask not in _GENERATORS:
        raise ValueError(f"unknown subtask {subtask!r}; choose one of {', '.join(SUBTASKS)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    if n < 0:
        raise ValueError(f"n={n} is out of range: give a number of at least 0")
    rng = Random(f"{subtask}/{split}/{seed}")
    found: dict[str, Example] = {}
    while len(found) < n:
        example = generate(subtask, split, rng)
        found.setdefault(example.turns[0], example)
    return list(found.values())
