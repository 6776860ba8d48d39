"""How long rounds take: measured in a few short calls, or computed from given times of passes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import hf_specdec
from hf_specdec.bench.figures.passes import Costs
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.records import Method
from hf_specdec.bench.running.bare_passes import keeping_engines
from hf_specdec.bench.running.methods import Contender
from hf_specdec.bench.running.turns import turn
from hf_specdec.bench.running.warming import warm_call, warm_up
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.rules.round_statistics import Round

_CALLS, _TOKENS = 8, 48  # calls per contender at least, new tokens per call
_SECONDS = 2.0  # per contender at least: short rounds vary more
_PROMPTS = 4
_PERIOD = 24  # length of the passage that a repetitive text repeats
_FEW = 3  # rounds of one width; the mean of fewer is not used


@dataclass(frozen=True)
class RoundTimes:
    """How long rounds take.

    Args:
        passes: of drafting by a model, per step, and of verification.
        look_up: seconds to find copies, in rounds without draft steps; None to time it while replaying.
        between: seconds from the end of one round to the beginning of the next.
        unsteady: what rounds took over what they take on average, in the order in which they were timed.
    """

    passes: Costs
    look_up: float | None = None
    between: float = 0.0
    unsteady: Sequence[float] = (1.0,)

    def drafting(self, steps: int, looking: float) -> float:
        """Seconds of `steps` draft steps in a row, or of finding copies: `looking` if that was not timed before."""
        found = looking if self.look_up is None else self.look_up
        return self.passes.drafting(steps) if steps else found


class Kind(NamedTuple):
    """Methods whose rounds of equal shape take equally long."""

    engine: str
    drafter: str
    automatic: bool

    @classmethod
    def of(cls, method: Method) -> Kind:
        """The kind of one of our methods."""
        return cls(method.engine, method.keywords["drafter"], method.lookahead == "auto")


@dataclass
class _Seen:
    rounds: list[Round] = field(default_factory=list)
    between: float = 0.0  # seconds, of all calls


def given_times(given: Mapping[str, Any], *, drafts: bool) -> RoundTimes:
    """Read the times given as `pass_times`; raise `BenchError` if they are malformed.

    Args:
        drafts: whether the time of a draft step is needed.
    """
    try:
        target = {int(tokens): float(value) / 1000 for tokens, value in given["target"].items()}
        costs = Costs({1: float(given["draft"]) / 1000} if drafts or "draft" in given else {}, target)
    except (KeyError, TypeError, ValueError, AttributeError):
        target = {}
    if 1 not in target:
        raise BenchError(
            "--pass_times: give milliseconds of the target's passes by tokens, of one token among them, and of a draft "
            """step where there is a draft: '{"target": {"1": 20, "5": 24}, "draft": 4}'"""
        )
    return RoundTimes(costs)


def measured_times(
    settings: Settings, contenders: Sequence[Contender], texts: Sequence[tuple[Prompt, Sequence[int]]]
) -> dict[Kind, RoundTimes]:
    """Measure how long the rounds of an engine take with each drafter, from a few short calls on a few prompts.

    Each drafter is called with its shortest, a middling and its longest lookahead, and "auto"; times between them are
    interpolated. Half of the calls continue the beginning of an answer, repeated many times, so that copied drafts
    are as long as possible.

    Args:
        contenders: the contenders on this engine.
        texts: prompts and their answers.

    Raises:
        BenchError: the models refuse a call, or the answers are too short to have rounds after the first.
    """
    short = replace(settings, max_new_tokens=min(settings.max_new_tokens, _TOKENS))
    chosen = _to_time(contenders)
    seen = {Kind.of(one.method): _Seen() for one in chosen}
    prompts = [shown for prompt, answer in texts for shown in (prompt, _repeating(prompt, answer))]
    with keeping_engines(len(chosen), contenders[0].pair.target.device):
        for one in chosen:
            warm_up(one, prompts[:1], short, most=2)
        began, number = time.perf_counter(), 0
        while number < _CALLS or time.perf_counter() - began < _SECONDS * len(chosen):
            for one in turn(chosen, number):
                call = warm_call(one, [prompts[number % len(prompts)]], short)
                stats = hf_specdec.last_speculation(one.pair.target)
                assert stats is not None, "a call of ours leaves statistics"
                here, later = seen[Kind.of(one.method)], stats.rounds[1:]
                here.rounds += later
                here.between += call.seconds - call.first_seconds - sum(each.seconds for each in later)
            number += 1
    if not all(here.rounds for here in seen.values()):
        raise BenchError("--dataset: no answer is long enough to time its rounds; give longer ones, or --pass_times")
    # The target's work does not depend on who drafted: its times are pooled, so that noise favours no drafter.
    rounds = [one for here in seen.values() for one in here.rounds]
    verifying = _means((one.width, one.seconds - one.draft_seconds) for one in rounds)
    return {kind: _times(here, verifying) for kind, here in seen.items()}


def some_texts(texts: Sequence[tuple[Prompt, Sequence[int]]]) -> list[tuple[Prompt, Sequence[int]]]:
    """A few of the texts to measure on: of short, middling and long prompts, each the one with the longest answer."""
    by_length = sorted(texts, key=lambda text: len(text[0].token_ids))
    parts = min(_PROMPTS, len(texts))
    bounds = [len(texts) * part // parts for part in range(parts + 1)]
    return [max(by_length[low:high], key=lambda text: len(text[1])) for low, high in pairwise(bounds)]


def _to_time(contenders: Sequence[Contender]) -> list[Contender]:
    chosen = []
    for drafter in dict.fromkeys(one.method.keywords["drafter"] for one in contenders):
        its = [one for one in contenders if one.method.keywords["drafter"] == drafter]
        fixed = [one for one in its if one.method.lookahead != "auto"]
        places = dict.fromkeys((0, len(fixed) // 2, len(fixed) - 1)) if fixed else ()
        chosen += [fixed[place] for place in places] + [one for one in its if one not in fixed]
    return chosen


def _repeating(prompt: Prompt, answer: Sequence[int]) -> Prompt:
    length = len(prompt.token_ids)
    return replace(prompt, token_ids=(tuple(answer[:_PERIOD]) * length)[:length])


def _times(seen: _Seen, verifying: Mapping[int, float]) -> RoundTimes:
    by_model = [one for one in seen.rounds if one.draft_steps]
    looked_up = [one.draft_seconds for one in seen.rounds if not one.draft_steps]
    drafting = _means((one.draft_steps, one.draft_seconds / one.draft_steps) for one in by_model)
    found = RoundTimes(
        Costs(drafting, verifying), fmean(looked_up) if looked_up else None, seen.between / len(seen.rounds)
    )
    usual = (found.drafting(one.draft_steps, 0.0) + found.passes.verification(one.width) for one in seen.rounds)
    return replace(found, unsteady=[one.seconds / taken for one, taken in zip(seen.rounds, usual, strict=True)])


def _means(seconds: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The mean time by number of tokens or steps; numbers seen in fewer than `_FEW` rounds only if all were.

    Not the median: calls spend the sum of all times, and rounds with drafts have more of the long ones.
    """
    seen: dict[int, list[float]] = {}
    for number, taken in seconds:
        seen.setdefault(number, []).append(taken)
    often = {number: some for number, some in seen.items() if len(some) >= _FEW} or seen
    return {number: fmean(some) for number, some in often.items()}
