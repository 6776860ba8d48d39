"""Figures from bare passes: c and v, the predicted speedup, and η, their share of the decoding time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

import numpy as np

from hf_specdec.bench.figures.frames import Part, alpha
from hf_specdec.bench.records import Method, Result
from hf_specdec.config import LOSSY_STRATEGIES

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Costs:
    """Median seconds of bare passes on one engine, at one batch size and prompt length.

    Args:
        draft: seconds of one draft step, by the number of steps in a row; empty without a draft.
        target: seconds of one target pass, by its width in tokens.
    """

    draft: Mapping[int, float]
    target: Mapping[int, float]

    def drafting(self, steps: int) -> float:
        """Seconds of `steps` draft steps in a row."""
        return steps * _between(self.draft, steps) if steps else 0.0

    def verification(self, width: int) -> float:
        """Seconds of a target pass over `width` tokens."""
        return _between(self.target, width)

    def ratios(self, lookahead: int) -> tuple[float, float]:
        """(c, v): a draft step, and a verification of lookahead + 1 tokens, each over one target step."""
        step = self.target[1]
        return _between(self.draft, lookahead) / step, self.verification(lookahead + 1) / step


def costs(result: Result, engine: str, batch: int = 1, draft: str | None = None) -> dict[int, Costs]:
    """The costs of an engine at a batch size, by prompt length, over all repeats; empty if it was not timed.

    Args:
        draft: the draft's name, if the result has several; None for any.
    """
    import pandas as pd

    found: dict[int, tuple[dict[int, float], dict[int, float]]] = {}
    listed = [
        one for one in result.passes if (one.engine, len(one.prompts)) == (engine, batch) and draft in (None, one.draft)
    ]
    if not listed:
        return {}
    medians = pd.DataFrame(map(vars, listed)).groupby(["length", "role", "tokens"])["seconds"].median()
    for (length, role, tokens), seconds in medians.items():
        sides = found.setdefault(int(length), ({}, {}))
        sides[role == "target"][int(tokens)] = float(seconds)
    return {length: Costs(*sides) for length, sides in sorted(found.items()) if 1 in sides[1]}


def nearest(known: Mapping[int, Costs], length: int) -> Costs:
    """The costs at the nearest prompt length."""
    return known[min(known, key=lambda other: (abs(other - length), other))]


def costs_of(part: Part, method: Method, batch: int = 1) -> Costs | None:
    """The engine's costs at the length nearest to each call's prompt, averaged over a method's calls.

    Covers the widths that were timed at all of these lengths. None without calls or costs.
    """
    known = costs(part.result, method.engine, batch, method.draft)
    lengths = part.where(batch=batch).of(method.name)["length"]
    listed = [nearest(known, length) for length in lengths] if known else []

    def means(sides: Sequence[Mapping[int, float]]) -> dict[int, float]:
        shared = set.intersection(*(set(side) for side in sides))
        return {key: mean(side[key] for side in sides) for key in sorted(shared)}

    return Costs(means([one.draft for one in listed]), means([one.target for one in listed])) if listed else None


def efficiency(part: Part, method: Method) -> float | None:
    """η: the time that bare passes on the same engine need for the decode parts of calls / the measured time.

    Bare passes hold the whole batch. Rounds that are not prepared leave out ended rows, so in batches η is an upper
    bound for them. None if the passes of the engine or of the draft were not timed.
    """
    calls = part.of(method.name)
    calls = calls[calls["decode_tokens"] > 0]
    known = {
        int(batch): costs(part.result, method.engine, int(batch), method.draft) for batch in calls["batch"].unique()
    }
    needed = 0.0
    for call in calls.itertuples():
        if not known[call.batch]:
            return None
        one = nearest(known[call.batch], call.length)
        if sum(call.steps[1:]) and not one.draft:
            return None
        needed += _needed(call, one)
    return needed / float(calls["decode_seconds"].sum()) if len(calls) else None


def _needed(call: pd.Series, passes: Costs) -> float:
    """Seconds that bare passes need for a call's decode part."""
    if not call.rounds:
        return float(call.decode_tokens / call.batch * passes.target[1])
    drafting = sum(times * passes.drafting(steps) for steps, times in enumerate(call.steps) if times)
    return drafting + sum(times * passes.verification(width) for width, times in enumerate(call.widths) if times)


def predicted_speedup(alpha: float, c: float, v: float, lookahead: int) -> float:
    """(1 - alpha^(lookahead+1)) / ((1 - alpha)(lookahead c + v)), after Leviathan et al. 2023, theorem 3.8.

    An estimate: it assumes that acceptance is independent from position to position, which it is not.
    """
    # The geometric sum, which also holds at alpha = 1.
    tokens = sum(alpha**power for power in range(lookahead + 1))
    return tokens / (lookahead * c + v)


def predicted(part: Part, method: Method, batch: int = 1) -> float | None:
    """The speedup over plain decoding on the same engine, predicted from the measured α, c and v.

    It assumes that no row waits for another. None without α or bare passes of draft and target, or if drafts have no
    fixed length or take no draft steps, since the formula needs both.
    """
    found, passes = alpha(part.where(batch=batch).of(method.name)), costs_of(part, method, batch)
    steadily = isinstance(method.lookahead, int) and _drafts_steadily(method)
    if found is None or passes is None or not passes.draft or not steadily:
        return None
    assert isinstance(method.lookahead, int)
    return predicted_speedup(found, *passes.ratios(method.lookahead), method.lookahead)


def _drafts_steadily(method: Method) -> bool:
    """Whether α and the lookahead determine its rounds: full-length drafts, one step per token, a lossless rule."""
    by_model = method.draft is not None and method.keywords.get("drafter", "model") == "model"
    return by_model and method.kind not in ("lookup", *LOSSY_STRATEGIES) and "entropy_threshold" not in method.keywords


def bandwidth_share(part: Part, method: Method) -> float | None:
    """Share of the bandwidth limit that a plain method reaches at batch size 1; None if the bytes are unknown.

    It is the bytes that the steps read / the bytes that the memory could deliver in the same time. Bandwidth was
    measured after each call, since other jobs can slow a shared machine's memory for minutes.
    """
    memory = part.result.memory
    calls = part.where(batch=1).of(method.name)
    calls = calls[(calls["decode_tokens"] > 0) & calls["read_rate"].notna()]
    if memory is None or memory.weight_bytes is None or memory.cache_bytes is None or not len(calls):
        return None
    read = calls["decode_tokens"].sum() * (memory.weight_bytes + memory.cache_bytes)
    return float(read / (calls["decode_seconds"] * calls["read_rate"]).sum())


def _between(known: Mapping[int, float], place: int) -> float:
    """The value at `place`, interpolated linearly between known ones, constant beyond them."""
    return float(np.interp(place, sorted(known), [known[key] for key in sorted(known)]))
