"""How long rounds take: measured in a few short calls, or computed from given times of passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import hf_specdec
from hf_specdec.bench.figures.passes import Costs
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.running.bare_passes import keeping_engines
from hf_specdec.bench.running.methods import Contender
from hf_specdec.bench.running.turns import turn
from hf_specdec.bench.running.warming import warm_call, warm_up
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.rules.round_statistics import Round

_CALLS, _TOKENS = 8, 48  # calls per contender, new tokens per call
_PERIOD = 24  # length of the passage that a repetitive text repeats
_FEW = 3  # rounds of one width; the mean of fewer is not used


def given_times(given: Mapping[str, Any], *, drafts: bool) -> Costs:
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
    return costs


def measured_times(
    settings: Settings, contenders: Sequence[Contender], prompt: Prompt, answer: Sequence[int]
) -> dict[str, Costs]:
    """Measure how long the rounds of an engine take with each drafter, from a few short calls on one prompt.

    Each drafter is called with its shortest, a middling and its longest lookahead; times between them are
    interpolated. Half of the calls continue the beginning of the answer, repeated many times, so that copied drafts
    are as long as possible.

    Args:
        contenders: the contenders on this engine.

    Raises:
        BenchError: the models refuse a call, or the answer is too short to have rounds after the first.
    """
    short = replace(settings, max_new_tokens=min(settings.max_new_tokens, _TOKENS))
    chosen: list[Contender] = []
    for drafter in dict.fromkeys(one.method.keywords["drafter"] for one in contenders):
        its = [one for one in contenders if one.method.keywords["drafter"] == drafter]
        fixed = [one for one in its if isinstance(one.method.lookahead, int)] or its
        chosen += {place: fixed[place] for place in (0, len(fixed) // 2, len(fixed) - 1)}.values()
    length = len(prompt.token_ids)
    repeating = replace(prompt, token_ids=(tuple(answer[:_PERIOD]) * length)[:length])
    rounds: dict[str, list[Round]] = {one.method.keywords["drafter"]: [] for one in chosen}
    with keeping_engines(len(chosen), contenders[0].pair.target.device):
        for one in chosen:
            warm_up(one, [prompt], short, most=2)
        for number in range(_CALLS):
            for one in turn(chosen, number):
                warm_call(one, [repeating if number % 2 else prompt], short)
                stats = hf_specdec.last_speculation(one.pair.target)
                assert stats is not None, "a call of ours leaves statistics"
                rounds[one.method.keywords["drafter"]] += stats.rounds[1:]
    if not all(rounds.values()):
        raise BenchError("--dataset: no answer is long enough to time its rounds; give longer ones, or --pass_times")
    # The target's work does not depend on who drafted: its times are pooled, so that noise favours no drafter.
    verifying = _means((one.width, one.seconds - one.draft_seconds) for some in rounds.values() for one in some)
    return {
        drafter: Costs(
            _means((one.draft_steps, one.draft_seconds / one.draft_steps) for one in some if one.draft_steps),
            verifying,
        )
        for drafter, some in rounds.items()
    }


def _means(seconds: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The mean time by number of tokens or steps; numbers seen in fewer than `_FEW` rounds only if all were.

    Not the median: calls spend the sum of all times, and rounds with drafts have more of the long ones.
    """
    seen: dict[int, list[float]] = {}
    for number, taken in seconds:
        seen.setdefault(number, []).append(taken)
    often = {number: some for number, some in seen.items() if len(some) >= _FEW} or seen
    return {number: fmean(some) for number, some in often.items()}
