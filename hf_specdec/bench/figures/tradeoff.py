"""BiLD against speculative decoding: what it gains in speed and loses in quality, subtask by subtask.

Pure functions from the dict that the JSON holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_specdec.bench.figures import speed

Result = Mapping[str, Any]

# Either can fall while the other doesn't: an answer may be wrong by one word, or be wrong already and get worse.
JUDGED = ("rougeL", "exact_match")


@dataclass(frozen=True)
class Verdict:
    """BiLD on one subtask, or on all for None.

    Args:
        ratios: decode tokens/s of BiLD / of speculative decoding, micro, one a repeat.
        differences: of each of `JUDGED`, BiLD's score - plain decoding's (0 to 100); None without references.
    """

    label: str | None
    ratios: tuple[float, ...]
    differences: Mapping[str, float] | None

    @property
    def known(self) -> bool:
        """Whether there are rates and references to judge by."""
        return bool(self.ratios) and self.differences is not None

    @property
    def faster(self) -> bool:
        """In every repeat."""
        return bool(self.ratios) and min(self.ratios) > 1

    @property
    def as_good(self) -> bool:
        """By no measure below plain decoding."""
        return self.differences is not None and min(self.differences.values()) >= 0

    @property
    def words(self) -> str:
        """The answer to: faster at no loss of quality?"""
        if self.differences is None:
            return "no references"
        if not self.ratios:
            return "no rates"
        if self.faster:
            return "yes" if self.as_good else "no: loses quality"
        return "no: not faster" if self.as_good else "no: neither"


def labels(result: Result) -> list[str]:
    """The subtasks, in the order of the data."""
    return list(dict.fromkeys(prompt["label"] for prompt in result["prompts"]))


def prompts_of(result: Result, label: str | None) -> list[int]:
    """The indexes of a subtask's prompts; of all for None."""
    return [prompt["index"] for prompt in result["prompts"] if label in (None, prompt["label"])]


def verdict(result: Result, label: str | None, bild: str, speculative: str) -> Verdict:
    """Of the methods with these names, on a subtask or on all."""
    ratios = speed.speedup_by_repeat(result["runs"], bild, speculative, prompts_of(result, label))
    scores = {entry["method"]: entry for entry in result["quality"] if entry["subtask"] == label}
    differences = None
    if bild in scores and "plain" in scores:
        differences = {name: round(scores[bild][name] - scores["plain"][name], 6) for name in JUDGED}
    return Verdict(label, tuple(ratios), differences)


def unknown(result: Result, bild: str, speculative: str) -> int:
    """On how many subtasks nothing can be said."""
    return sum(not verdict(result, label, bild, speculative).known for label in labels(result))


def won(result: Result, bild: str, speculative: str) -> int | None:
    """On how many subtasks BiLD is faster at no loss of quality; None where nothing tells the quality."""
    verdicts = [verdict(result, label, bild, speculative) for label in labels(result)]
    if all(item.differences is None for item in verdicts):
        return None
    return sum(item.faster and item.as_good for item in verdicts)
