"""How long rounds take: times of bare passes, timed here or given, and what the loop needs besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hf_specdec.bench.figures.passes import Costs, costs, nearest
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Call, Pass, Result
from hf_specdec.bench.running.bare_passes import BarePasses, keeping_engines, widths_for
from hf_specdec.bench.running.methods import Contender
from hf_specdec.bench.running.warming import warm_call, warm_up
from hf_specdec.bench.settings import BenchError, Settings

_SAMPLES = 5  # calls of each drafter, and passes after each
_LOOKAHEAD = 4  # of these calls, or the next one that is compared


@dataclass(frozen=True)
class Times:
    """Seconds of a drafter's rounds on an engine.

    Args:
        passes: of target and draft.
        step, round: what a draft step and a round take beyond their passes.
    """

    passes: Costs
    step: float = 0.0
    round: float = 0.0

    def drafting(self, steps: int) -> float:
        """Of this many draft steps in a row."""
        return self.passes.drafting(steps) + steps * self.step

    def verification(self, width: int) -> float:
        """Of the rest of a round, whose pass over the target has so many tokens."""
        return self.passes.verification(width) + self.round


def given_times(settings: Settings, pair: LoadedPair, engine: str, prompt: Prompt) -> list[Pass]:
    """The times of `pass_times`, as if measured on an engine; raises `BenchError` where they are none."""
    target, step = settings.pass_times.get("target"), settings.pass_times.get("draft")
    try:
        times = [("target", int(tokens), float(value)) for tokens, value in (target or {}).items()]
        times += [] if step is None else [("draft", 1, float(step))]
    except (TypeError, ValueError, AttributeError):
        times = []
    if not any(one[:2] == ("target", 1) for one in times) or (step is None and pair.draft is not None):
        raise BenchError(
            "--pass_times: give milliseconds of the target's passes by tokens, of one token among them, and of a draft "
            """step where there is a draft: '{"target": {"1": 20, "5": 24}, "draft": 4}'"""
        )
    place = engine, pair.draft_name, (prompt.index,), 0, len(prompt.token_ids)
    return [Pass(*place, role, tokens, milliseconds / 1000) for role, tokens, milliseconds in times]


def measured_times(
    settings: Settings, contenders: Sequence[Contender], prompt: Prompt, result: Result
) -> dict[str, Times]:
    """The times of an engine by drafter, from a few short calls of each on one prompt, and bare passes between them.

    The passes are added to the result.

    Args:
        contenders: all that run on this engine.
    """
    engine, pair, shown = contenders[0].method.engine, contenders[0].pair, len(result.passes)
    chosen: dict[str, Contender] = {}
    for one in sorted(contenders, key=_distance):
        chosen.setdefault(one.method.keywords["drafter"], one)
    bare = BarePasses(pair, settings.max_new_tokens, widths_for(contenders))
    calls: dict[str, list[Call]] = {name: [] for name in chosen}
    with keeping_engines(len(contenders), pair.target.device):
        # Compiled passes are those of the calls before; of other engines any width can be timed.
        for one in contenders if engine in ("static", "compiled") else chosen.values():
            warm_up(one, [prompt], settings, most=2)
        for repeat in range(_SAMPLES):
            for name, one in chosen.items():
                calls[name].append(warm_call(one, [prompt], settings, repeat=repeat))
            place = engine, pair.draft_name, (prompt.index,), repeat, len(prompt.token_ids)
            result.passes += [Pass(*place, *timed) for timed in bare.sample(engine, [prompt])]
    if len(result.passes) == shown:
        raise BenchError(f"--engines: {engine!r} runs no passes of its own here (a warning says why); leave it out")
    passes = nearest(costs(result, engine), len(prompt.token_ids))
    return {name: _beyond(passes, made) for name, made in calls.items()}


def _distance(one: Contender) -> float:
    tokens = one.method.lookahead
    return abs(tokens - _LOOKAHEAD) if isinstance(tokens, int) else float("inf")


def _beyond(passes: Costs, calls: Sequence[Call]) -> Times:
    """Passes, and the medians over calls of what their later rounds took beyond them; less than they is noise."""
    step, round = [], []
    for call in calls:
        steps, rounds = sum(n * times for n, times in enumerate(call.steps)), call.rounds - 1
        drafting, whole = call.draft_seconds, call.round_seconds
        if rounds > 0 and drafting is not None and whole is not None:
            needed = sum(times * passes.verification(width) for width, times in enumerate(call.widths) if times)
            round.append((whole - drafting - needed) / rounds)
            drafted = sum(times * passes.drafting(n) for n, times in enumerate(call.steps) if times)
            step += [(drafting - drafted) / steps] if steps else []
    return Times(passes, max(median(step or [0.0]), 0.0), max(median(round or [0.0]), 0.0))
