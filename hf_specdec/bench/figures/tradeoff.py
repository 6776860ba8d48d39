"""Lossy strategies compared with speculative decoding: gain in speed and loss of quality, subtask by subtask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import Ratio
from hf_specdec.bench.figures.quality import Difference, difference, of_differences, per_example
from hf_specdec.bench.figures.speed import MethodDict, Result
from hf_specdec.config import LOSSY_STRATEGIES

# Any can fall while the others don't: an answer may be wrong by one word, or be wrong already and get worse.
JUDGED = ("rougeL", "exact_match", "facts")
MOST_LOSS = 1.0  # points
SCORE = "facts"  # the subtask's score: defined for free answers as well as for short ones
_LOSSLESS = ("plain", "none", "assisted", "speculative")


def kept(measured: Difference | None) -> bool:
    """Whether no answer is worse, or a loss of more than `MOST_LOSS` points is excluded.

    The first is said of the sample alone: few questions exclude nothing.
    """
    return measured is not None and (measured.worse == 0 or measured.excludes(MOST_LOSS))


@dataclass(frozen=True)
class Verdict:
    """BiLD on one subtask, or on all for None.

    Args:
        speed: decode tokens/s of BiLD / of speculative decoding; None without rates.
        differences: of each of `JUDGED`, BiLD's score less plain decoding's, in points; None without references.
    """

    label: str | None
    speed: Ratio | None
    differences: Mapping[str, Difference] | None

    @property
    def known(self) -> bool:
        """Whether there are rates and references for a verdict."""
        return self.speed is not None and self.differences is not None

    @property
    def faster(self) -> bool:
        """Whether the interval of the speed lies above 1."""
        return self.speed is not None and self.speed.faster

    @property
    def as_good(self) -> bool:
        """Whether every measure excludes a loss of more than `MOST_LOSS` points."""
        return self.differences is not None and all(one.excludes(MOST_LOSS) for one in self.differences.values())

    @property
    def none_worse(self) -> bool:
        """Whether no answer of these examples is worse by any measure, which alone excludes no loss beyond them."""
        return self.differences is not None and not any(one.worse for one in self.differences.values())

    @property
    def kept(self) -> bool:
        """Whether quality is kept, as `kept` has it, but by all measures together."""
        return self.as_good or self.none_worse

    @property
    def words(self) -> str:
        """The answer to: faster at no loss of quality?"""
        if self.differences is None:
            return "no references"
        if self.speed is None:
            return "no rates"
        if self.faster:
            if self.as_good:
                return "yes"
            return "open: no answer worse" if self.none_worse else "no: loss not excluded"
        return "no: not faster" if self.kept else "no: neither"


def labels(result: Result) -> list[str]:
    """The subtasks, in the order of the data."""
    return list(dict.fromkeys(prompt["label"] for prompt in result["prompts"]))


def prompts_of(result: Result, label: str | None) -> list[int]:
    """The indexes of a subtask's prompts; of all for None."""
    return [prompt["index"] for prompt in result["prompts"] if label in (None, prompt["label"])]


def verdict(result: Result, label: str | None, bild: str, speculative: str) -> Verdict:
    """The verdict on the methods with these names, for a subtask or for all."""
    prompts = prompts_of(result, label)
    ratio = speed.speedup(result, bild, speculative, prompts=prompts)
    found = {name: difference(result, bild, "plain", name, prompts) for name in JUDGED}
    differences = {name: value for name, value in found.items() if value is not None}
    return Verdict(label, ratio, differences or None)


def verdicts(result: Result, bild: str, speculative: str) -> list[Verdict]:
    """The verdict for each subtask."""
    return [verdict(result, label, bild, speculative) for label in labels(result)]


def won(found: Sequence[Verdict]) -> int | None:
    """The number of subtasks on which BiLD is faster with quality kept; None if quality is unknown."""
    if all(one.differences is None for one in found):
        return None
    return sum(one.faster and one.kept for one in found)


def lossy_methods(result: Result) -> list[MethodDict]:
    """The methods of this package that may lose quality."""
    return [method for method in result["methods"] if method["kind"] in LOSSY_STRATEGIES and method["same_engine"]]


def lossless_reference(result: Result, method: MethodDict) -> MethodDict | None:
    """Speculative decoding with a lossy method's draft and engine, at its own fastest lookahead; None without any."""
    own = {"verification", "drafter", "entropy_threshold"}
    alike = [
        one
        for one in result["methods"]
        if one["kind"] == "speculative"
        and (one["draft"], one["engine"]) == (method["draft"], method["engine"])
        and _part(one, own) == _part(method, own)
    ]
    return speed.fastest_of(result, alike)


def at_fastest_lookahead(result: Result, methods: Sequence[MethodDict]) -> list[MethodDict]:
    """Of methods that differ in their lookahead alone, the one that is fastest over all examples."""
    alike: dict[str, list[MethodDict]] = {}
    for method in methods:
        others = _part(method, set(method["keywords"]) - {"num_assistant_tokens"})
        alike.setdefault(repr((method["kind"], method["draft"], others)), []).append(method)
    return [speed.fastest_of(result, group) or group[0] for group in alike.values()]


def gain(result: Result, method: MethodDict, prompts: list[int]) -> Ratio | None:
    """Speed of a lossy method over its `lossless_reference`; None without that or without rates."""
    base = lossless_reference(result, method)
    return None if base is None else speed.speedup(result, method["name"], base["name"], prompts=prompts)


def change(result: Result, method: str, prompts: list[int]) -> Difference | None:
    """Mean over examples of a method's `SCORE` minus that of the lossless methods.

    The lossless methods' scores are averaged: in sampling each is a separate draw from the same distribution.
    None without references.
    """
    bases = [
        per_example(result, m["name"], SCORE, prompts)
        for m in result["methods"]
        if m["kind"] in _LOSSLESS and m["name"] != method
    ]
    ours = per_example(result, method, SCORE, prompts)
    points = {}
    for index, score in ours.items():
        lossless = [base[index] for base in bases if index in base]
        if lossless:
            points[index] = score - sum(lossless) / len(lossless)
    return of_differences(result, points)


def _part(method: MethodDict, names: set[str]) -> dict[str, object]:
    return {name: value for name, value in method["keywords"].items() if name in names}
