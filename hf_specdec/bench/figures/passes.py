"""Figures from bare passes: c and v, the predicted speedup, and η, the share of the decoding time that they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hf_specdec.bench.figures import rounds, speed
from hf_specdec.bench.figures.speed import MethodDict, Result
from hf_specdec.bench.running.timed_call import Call
from hf_specdec.config import LOSSY_STRATEGIES


@dataclass(frozen=True)
class Costs:
    """Medians of bare passes on one engine, at one batch size and prompt length, in seconds.

    Args:
        draft: of one draft step, by the number of steps that ran in a row; empty without a draft.
        target: of one target pass, by its width in tokens.
    """

    draft: Mapping[int, float]
    target: Mapping[int, float]

    def drafting(self, steps: int) -> float:
        """Seconds of this many draft steps in a row."""
        return steps * _between(self.draft, steps) if steps else 0.0

    def verification(self, width: int) -> float:
        """Seconds of a target pass over this many tokens."""
        return _between(self.target, width)

    def ratios(self, lookahead: int) -> tuple[float, float]:
        """(c, v): a draft step, and a verification of lookahead + 1 tokens, each over one target step."""
        step = self.target[1]
        return _between(self.draft, lookahead) / step, self.verification(lookahead + 1) / step


def costs(result: Result, engine: str, batch: int = 1, draft: str | None = None) -> dict[int, Costs]:
    """The costs of an engine at a batch size, by prompt length, over all repeats; empty if it was not timed.

    Args:
        draft: the draft's name, where the result has several; None: any.
    """
    samples: dict[int, list[Mapping[str, Any]]] = {}
    for item in result["passes"]:
        if (item["engine"], item["batch"]) == (engine, batch) and draft in (None, item["draft"]):
            samples.setdefault(item["length"], []).append(item["times"])
    found = {
        length: Costs(_medians(times, "draft"), _medians(times, "target")) for length, times in sorted(samples.items())
    }
    return {length: one for length, one in found.items() if 1 in one.target}


def nearest(known: Mapping[int, Costs], length: int) -> Costs:
    """The costs at the prompt length that is closest."""
    return known[min(known, key=lambda other: (abs(other - length), other))]


def costs_of(result: Result, method: MethodDict, calls: Iterable[Call], batch: int = 1) -> Costs | None:
    """The means over a method's calls of its engine's costs at the length nearest to each call's prompt.

    For widths that were timed at all lengths that occur. None without calls or costs.
    """
    known = costs(result, method["engine"], batch, method["draft"])
    return pooled([nearest(known, length) for length in _lengths(result, calls)] if known else [])


def pooled(listed: Sequence[Costs]) -> Costs | None:
    """The means of costs, for widths that all of them have; None without costs."""
    if not listed:
        return None

    def means(sides: Sequence[Mapping[int, float]]) -> dict[int, float]:
        shared = set.intersection(*(set(side) for side in sides))
        return {key: sum(side[key] for side in sides) / len(sides) for key in sorted(shared)}

    return Costs(means([one.draft for one in listed]), means([one.target for one in listed]))


def efficiency(result: Result, calls: Iterable[Call]) -> float | None:
    """η: the time that bare passes on the same engine need for the decode parts of calls / the time that these took.

    Bare passes hold the whole batch. Rounds that are not prepared leave out rows that have ended, so that in batches
    η is an upper bound for them. None where the engine's passes were not timed, or not those of the draft.
    """
    listed = list(calls)
    methods = {method["name"]: method for method in result["methods"]}
    known: dict[tuple[str, int], dict[int, Costs]] = {}
    needed = measured = 0.0
    for call, length in zip(listed, _lengths(result, listed), strict=True):
        part, place = speed.decode_part(call), (call.method, call.batch)
        if part is None:
            continue
        if place not in known:
            method = methods[call.method]
            known[place] = costs(result, method["engine"], call.batch, method["draft"])
        one = nearest(known[place], length) if known[place] else None
        if one is None or (call.rounds is not None and any(call.rounds.draft_steps[1:]) and not one.draft):
            return None
        measured += part[0]
        needed += _needed(call, part[1], one)
    return needed / measured if measured else None


def _lengths(result: Result, calls: Iterable[Call]) -> list[int]:
    """Of each call's longest prompt, in tokens."""
    lengths = {prompt["index"]: prompt["tokens"] for prompt in result["prompts"]}
    return [max(lengths[index] for index in call.prompts) for call in calls]


def _needed(call: Call, tokens: int, passes: Costs) -> float:
    """Seconds that bare passes take for a call's decode part of so many tokens."""
    if call.rounds is None:
        return tokens / call.batch * passes.target[1]
    steps, widths = call.rounds.draft_steps[1:], call.rounds.width[1:]
    return sum(passes.drafting(n) for n in steps) + sum(passes.verification(width) for width in widths)


def predicted_speedup(alpha: float, c: float, v: float, lookahead: int) -> float:
    """(1 - alpha^(lookahead+1)) / ((1 - alpha)(lookahead c + v)), after Leviathan et al. 2023, theorem 3.8.

    An estimate: it assumes that acceptance is independent from position to position, which it is not.
    """
    # The geometric sum, which also holds at alpha = 1.
    tokens = sum(alpha**power for power in range(lookahead + 1))
    return tokens / (lookahead * c + v)


def predicted(result: Result, method: MethodDict, batch: int = 1, prompts: Iterable[int] | None = None) -> float | None:
    """The speedup over plain decoding on the same engine that measured α, c and v predict.

    It assumes that no row waits for another. None without α or bare passes of draft and target, and if drafts have no
    fixed length or take no draft steps, since the formula needs both.
    """
    lookahead = method["lookahead"] if _drafts_steadily(method) else None
    calls = speed.calls_of(result, method["name"], batch=batch, prompts=prompts)
    alpha, passes = rounds.alpha(calls), costs_of(result, method, calls, batch)
    if alpha is None or passes is None or not passes.draft or not isinstance(lookahead, int):
        return None
    return predicted_speedup(alpha, *passes.ratios(lookahead), lookahead)


def _drafts_steadily(method: MethodDict) -> bool:
    """Whether α and the lookahead tell its rounds: full-length drafts, one step a token, and a lossless rule."""
    keywords = method["keywords"]
    by_model = method["kind"] != "lookup" and keywords.get("drafter", "model") == "model"
    return by_model and method["kind"] not in LOSSY_STRATEGIES and "entropy_threshold" not in keywords


def share_of_allowed(result: Result, method: MethodDict, batch: int = 1) -> float | None:
    """Measured speed / the speed of the same rounds if they took only their bare passes and no row waited for another.

    That is η times the share of row-rounds in which the row had not ended. Tokens per round are those measured, so
    acceptance that differs from position to position can't raise it above 1.
    """
    calls = speed.calls_of(result, method["name"], batch=batch)
    eta, idle = efficiency(result, calls), rounds.waiting(calls)
    return None if eta is None or idle is None else eta * (1 - idle)


def allowed(result: Result, method: MethodDict, batch: int = 1) -> float | None:
    """The speedup over plain decoding on the method's engine at a share of 1; None where either isn't known."""
    base, share = speed.baseline(result, method, "engine", batch), share_of_allowed(result, method, batch)
    if base is None or not share:
        return None
    measured = speed.speedup(result, method["name"], base["name"], batch=batch)
    return None if measured is None else measured.value / share


def _medians(samples: Sequence[Mapping[str, Any]], key: str) -> dict[int, float]:
    """The median of each number of steps or tokens, over all samples that have it."""
    times: dict[int, list[float]] = {}
    for sample in samples:
        for number, seconds in sample[key].items():
            times.setdefault(int(number), []).extend(seconds)
    return {number: median(seconds) for number, seconds in sorted(times.items()) if seconds}


def _between(known: Mapping[int, float], place: int) -> float:
    """The value at a place, linear between known ones, level beyond them."""
    below = max((key for key in known if key <= place), default=min(known))
    above = min((key for key in known if key >= place), default=max(known))
    if below == above:
        return known[below]
    share = (place - below) / (above - below)
    return (1 - share) * known[below] + share * known[above]
