"""From raw runs to figures: pure functions over the dicts that the JSON holds; times in seconds.

A run is `vars(measure.Run)`. "First delivery" is what the first round brought: one token in plain decoding,
up to lookahead + 1 with a draft. Rates count what came after it only; a run in which nothing did has no
decode rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

RunDict = Mapping[str, Any]


def first_delivery(run: RunDict) -> tuple[float, int]:
    """(seconds from the call to the first delivery, tokens that it brought)."""
    tokens = run["rounds"][0]["new_tokens"] if run["rounds"] else run["puts"][0][1]
    return run["puts"][0][0], tokens


def decode_part(run: RunDict) -> tuple[float, int] | None:
    """(seconds, tokens) after the first delivery; None without a token there, so nothing is divided by it."""
    seconds, tokens = first_delivery(run)
    after = len(run["tokens"]) - tokens
    return (run["seconds"] - seconds, after) if after > 0 else None


def typical_run(runs: Sequence[RunDict]) -> RunDict:
    """Of the repeats of one prompt and method, the one with the median total time (the lower of two).

    A run that really happened, so that its parts add up.
    """
    return sorted(runs, key=lambda run: run["seconds"])[(len(runs) - 1) // 2]


def typical_runs(runs: Iterable[RunDict], method: str, prompts: Iterable[int] | None = None) -> dict[int, RunDict]:
    """`typical_run` of each prompt, by its index; of the given prompts only, where given."""
    repeats: dict[int, list[RunDict]] = {}
    wanted = None if prompts is None else set(prompts)
    for run in runs:
        if run["method"] == method and (wanted is None or run["prompt"] in wanted):
            repeats.setdefault(run["prompt"], []).append(run)
    return {prompt: typical_run(group) for prompt, group in sorted(repeats.items())}


def spread(runs: Sequence[RunDict]) -> float:
    """(slowest - fastest) / median total time of the repeats of one prompt and method."""
    seconds = [run["seconds"] for run in runs]
    return (max(seconds) - min(seconds)) / median(seconds)


def micro_rate(runs: Iterable[RunDict]) -> float | None:
    """Tokens per second after the first delivery: all tokens / all seconds."""
    parts = [part for run in runs if (part := decode_part(run)) is not None]
    return sum(tokens for _, tokens in parts) / sum(seconds for seconds, _ in parts) if parts else None


def macro_rate(runs: Iterable[RunDict]) -> float | None:
    """Tokens per second after the first delivery: mean of the runs' rates (as Spec-Bench does)."""
    rates = [part[1] / part[0] for run in runs if (part := decode_part(run)) is not None]
    return mean(rates) if rates else None


def end_to_end_rate(runs: Iterable[RunDict]) -> float:
    """New tokens / total seconds, prefill included: all tokens / all seconds."""
    listed = list(runs)
    return sum(len(run["tokens"]) for run in listed) / sum(run["seconds"] for run in listed)


def speedup(runs: Mapping[int, RunDict], baseline: Mapping[int, RunDict]) -> float | None:
    """Ratio of micro decode rates over the prompts for which both have one; None if there are none."""
    both = [
        prompt for prompt in runs if prompt in baseline and decode_part(runs[prompt]) and decode_part(baseline[prompt])
    ]
    rate, base = micro_rate(runs[p] for p in both), micro_rate(baseline[p] for p in both)
    return None if rate is None or base is None else rate / base


def macro_speedup(runs: Mapping[int, RunDict], baseline: Mapping[int, RunDict]) -> float | None:
    """Ratio of the means of the runs' decode rates, over the prompts for which both have one (Spec-Bench)."""
    both = [
        prompt for prompt in runs if prompt in baseline and decode_part(runs[prompt]) and decode_part(baseline[prompt])
    ]
    rate, base = macro_rate(runs[p] for p in both), macro_rate(baseline[p] for p in both)
    return None if rate is None or base is None else rate / base


def by_repeat(runs: Sequence[RunDict], method: str) -> list[list[RunDict]]:
    """The runs of a method, one list a repeat."""
    repeats = sorted({run["repeat"] for run in runs})
    return [[run for run in runs if run["repeat"] == repeat and run["method"] == method] for repeat in repeats]


def end_to_end_speedup(runs: Mapping[int, RunDict], baseline: Mapping[int, RunDict]) -> float:
    """Ratio of end-to-end rates."""
    return end_to_end_rate(runs.values()) / end_to_end_rate(baseline.values())


def speedup_by_repeat(
    runs: Sequence[RunDict],
    method: str,
    baseline: str,
    prompts: Iterable[int] | None = None,
    ratio: Callable[[Mapping[int, RunDict], Mapping[int, RunDict]], float | None] = speedup,
) -> list[float]:
    """`ratio` within each repeat on its own, where methods took turns on each prompt; of the given prompts only.

    Tables show the median of these, and their extremes: no drift of the machine between repeats is in either.
    """
    wanted = None if prompts is None else set(prompts)
    both = [run for run in runs if run["method"] in (method, baseline)]
    ratios = []
    for repeat in sorted({run["repeat"] for run in both}):
        these = [run for run in both if run["repeat"] == repeat]
        sides = typical_runs(these, method, wanted), typical_runs(these, baseline, wanted)
        found = ratio(*sides) if all(sides) else None
        if found is not None:
            ratios.append(found)
    return ratios


def middle(values: Sequence[float]) -> float | None:
    """The median; None without values."""
    return median(values) if values else None


def round_parts(runs: Iterable[RunDict]) -> dict[str, float] | None:
    """Mean seconds of a round's `draft`, `verify` and `overhead` (the rest of it), and mean `draft_steps`.

    Without each run's first round, which holds the prompt. None for a method that doesn't tell.
    """
    rounds = [item for run in runs for item in (run["rounds"] or ())[1:] if item["seconds"] is not None]
    if not rounds:
        return None
    draft, verify = (mean(item[key] for item in rounds) for key in ("draft_seconds", "verify_seconds"))
    overhead = mean(item["seconds"] for item in rounds) - draft - verify
    steps = mean(item["draft_steps"] for item in rounds)
    return {"draft": draft, "verify": verify, "overhead": overhead, "draft_steps": steps}


def acceptance_rate(runs: Iterable[RunDict]) -> float | None:
    """Accepted drafted tokens / drafted tokens; None where nothing was drafted."""
    rounds = [item for run in runs for item in run["rounds"] or ()]
    drafted = sum(item["drafted"] for item in rounds)
    return sum(item["accepted"] for item in rounds) / drafted if drafted else None


def acceptance_by_position(runs: Iterable[RunDict]) -> list[float]:
    """Share of accepted tokens at each draft position, among the rounds that reached it."""
    reached: dict[int, int] = {}
    accepted: dict[int, int] = {}
    for item in (item for run in runs for item in run["rounds"] or ()):
        for position in range(min(item["accepted"] + 1, item["drafted"])):
            reached[position] = reached.get(position, 0) + 1
            accepted[position] = accepted.get(position, 0) + (position < item["accepted"])
    return [accepted[position] / reached[position] for position in sorted(reached)]


def tokens_per_round(runs: Iterable[RunDict]) -> float | None:
    """New tokens / target verification passes, the target's own token included; None for plain decoding."""
    rounds = [item for run in runs for item in run["rounds"] or ()]
    return sum(item["new_tokens"] for item in rounds) / len(rounds) if rounds else None


def alpha(runs: Iterable[RunDict]) -> float | None:
    """Leviathan's alpha: mean over the drafted positions reached of the overlap of both distributions.

    Reached are the accepted positions and the first that failed in each round. None for a method that doesn't
    tell the overlap (transformers' own in sampling) and where nothing was drafted.
    """
    rounds = [item for run in runs for item in run["rounds"] or ()]
    reached = sum(min(item["accepted"] + 1, item["drafted"]) for item in rounds)
    if not reached or any(item["overlap"] is None for item in rounds):
        return None
    return sum(item["overlap"] for item in rounds) / reached


def pooled_forwards(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One set of raw forwards from several, each {"draft_step": [seconds], "target": {width: [seconds]}}."""
    widths = dict.fromkeys(width for sample in samples for width in sample["target"])
    return {
        "draft_step": [seconds for sample in samples for seconds in sample["draft_step"]],
        "target": {
            width: [seconds for sample in samples for seconds in sample["target"].get(width, ())] for width in widths
        },
    }


def cost_ratios(forwards: Mapping[str, Any], lookahead: int) -> tuple[float, float]:
    """(c, v): a draft step and a (lookahead + 1)-token verification, each over one target step, all raw."""
    step = median(forwards["target"]["1"])
    return median(forwards["draft_step"]) / step, median(forwards["target"][str(lookahead + 1)]) / step


def predicted_speedup(alpha: float, c: float, v: float, lookahead: int) -> float:
    """(1 - alpha^(lookahead+1)) / ((1 - alpha)(lookahead c + v)), after Leviathan et al. 2023.

    An estimate: it takes acceptance for independent from position to position, which it is not.
    """
    # The geometric sum, which also holds at alpha = 1.
    tokens = sum(alpha**power for power in range(lookahead + 1))
    return tokens / (lookahead * c + v)


def needed_seconds(run: RunDict, forwards: Mapping[str, Any]) -> float:
    """What the models alone need for the decode part, from the medians of raw forwards of the same shapes."""
    target = {int(width): median(times) for width, times in forwards["target"].items()}
    if run["rounds"] is None:
        return (len(run["tokens"]) - first_delivery(run)[1]) * target[1]
    step = median(forwards["draft_step"])
    return sum(item["draft_steps"] * step + target[item["width"]] for item in run["rounds"][1:])


def efficiency(runs: Iterable[RunDict], forwards_of: Mapping[int, Mapping[str, Any]]) -> float | None:
    """eta: needed seconds / measured decode seconds; `forwards_of` maps a prompt's index to raw forwards."""
    needed = measured = 0.0
    for run in runs:
        part = decode_part(run)
        if part is not None:
            needed += needed_seconds(run, forwards_of[run["prompt"]])
            measured += part[0]
    return needed / measured if measured else None


def first_divergence(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first position at which the outputs differ (one being longer counts); None if they are equal."""
    for position, (one, other) in enumerate(zip(tokens, reference, strict=False)):
        if one != other:
            return position
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))
