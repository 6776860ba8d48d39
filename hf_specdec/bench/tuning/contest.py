"""The candidates of the task tune, the races between them at one batch size, and what is chosen."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import ENOUGH
from hf_specdec.bench.figures.frames import Part, frame
from hf_specdec.bench.figures.quality import Difference, worst_difference
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Call, ColdStart, Interval, Method, Result, Tuned
from hf_specdec.bench.running.bare_passes import keeping_engines
from hf_specdec.bench.running.methods import (
    ENGINES,
    STOP_ENTROPY,
    STOP_LOOKAHEAD,
    Contender,
    named,
    plain,
    plain_on_engine,
)
from hf_specdec.bench.running.timed_call import with_texts
from hf_specdec.bench.running.warming import warm_call, warm_up
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tuning.halving import successive_halving
from hf_specdec.prepared.engine import prepared_capacity
from hf_specdec.prepared.engine_store import kept_engines

Batch = tuple[Prompt, ...]
Keywords = Mapping[str, Any]

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12)
# The most promising first: if time is short, the last ones are not tried.
_STOP: Keywords = {"entropy_threshold": STOP_ENTROPY}
_FIRST: Keywords = {"num_assistant_tokens": 4}
_COPIES: Sequence[Keywords] = [{"num_assistant_tokens": "auto", "drafter": "suffix"}]
_SPECULATIVE: Sequence[Keywords] = [
    {"num_assistant_tokens": "auto", **_STOP},
    {"num_assistant_tokens": "auto"},
    {"num_assistant_tokens": STOP_LOOKAHEAD, **_STOP},
    *({"num_assistant_tokens": tokens} for tokens in (2, 6, 3, 8)),
    {"num_assistant_tokens": 4, "drafter": "hybrid"},
    {"num_assistant_tokens": "auto", "drafter": "hybrid"},
    *({"num_assistant_tokens": tokens} for tokens in (1, 12)),
]
_BILD: Sequence[Keywords] = [
    {"num_assistant_tokens": tokens, "fallback_threshold": fallback, "rollback_threshold": rollback}
    for fallback, rollback in ((0.6, 3.0), (0.3, 3.0), (0.6, 1.0), (0.3, 1.0))
    for tokens in (8, 4)
]

_FIRST_SHARE = 0.4  # share of the time for the engine that needs no preparation, if others follow
_PREPARING_SHARE = 0.5  # share of the remaining time for preparing the other engines
_ASSUMED_SECONDS = {"static": 5.0, "compiled": 30.0}  # for preparing a candidate, until one was prepared
_WARM_UPS = 2  # calls; later calls that prepare something are not measured either
_FINALISTS = 3  # candidates of the first engine that compete with those of the others


def unprepared_engine(settings: Settings, pair: LoadedPair) -> str:
    """The engine on which settings are compared first: recorded, or on a GPU static caches if requested."""
    return "static" if pair.target.device.type == "cuda" and "static" in settings.engines else "recorded"


def candidates(settings: Settings, pairs: Sequence[LoadedPair]) -> list[Contender]:
    """Every draft and setting on the engine that needs no preparation, the most promising first.

    BiLD is included if `max_quality_loss` is given.
    """
    engine = unprepared_engine(settings, pairs[0])
    drafting = [pair for pair in pairs if pair.draft is not None]

    def crossed(strategy: str, listed: Sequence[Keywords], some: Sequence[LoadedPair] = drafting) -> list[Contender]:
        return [named(strategy, {**one, **ENGINES[engine]}, pair) for one in listed for pair in some]

    found = [plain_on_engine(ENGINES[engine], pairs[0]), *crossed("speculative", [_FIRST])]
    found += crossed("speculative", _COPIES, pairs[:1]) + crossed("speculative", _SPECULATIVE)
    if settings.max_quality_loss is not None:
        # In the middle, so that a short time drops some lossless and some lossy candidates.
        found[len(found) // 2 : len(found) // 2] = crossed("bild", _BILD)
    return found


def on_engine(engine: str, ranking: Sequence[Contender]) -> list[Contender]:
    """The candidates of another engine's ranking that are worth preparing on this one, the most promising first.

    These are the fastest of each way of drafting; two lookaheads near the fastest fixed one, since engines may favour
    different lengths; and no draft, which comes first if drafts don't pay.
    """
    found: list[Contender] = []
    ways: set[tuple[Any, ...]] = set()
    neighbours = True
    for one in ranking:
        method = one.method
        by_model = method.draft is not None and "drafter" not in method.keywords
        length = "stopped" if "entropy_threshold" in method.keywords else method.lookahead == "auto"
        way = (method.kind, method.draft, method.keywords.get("drafter"), length)
        # Compiled rounds need a draft model as the only drafter.
        if method.kind == "none" or way in ways or (engine == "compiled" and not by_model):
            continue
        ways.add(way)
        found.append(_again(one, engine))
        if neighbours and is_fixed(method):
            neighbours = False
            place = LOOKAHEADS.index(method.keywords["num_assistant_tokens"])
            beside = (*LOOKAHEADS[place + 1 : place + 2], *LOOKAHEADS[max(0, place - 1) : place])
            found += [_again(one, engine, tokens) for tokens in beside]
    if ranking:
        place = 0 if ranking[0].method.kind == "none" else 1
        found.insert(place, plain_on_engine(ENGINES[engine], ranking[0].pair))
    return found


def _again(one: Contender, engine: str, tokens: int | None = None) -> Contender:
    """The same candidate on another engine, with another lookahead if one is given."""
    engines = {name for given in ENGINES.values() for name in given}
    kept = {name: value for name, value in one.method.keywords.items() if name not in engines}
    more = {} if tokens is None else {"num_assistant_tokens": tokens}
    return named(kept.pop("generation_strategy"), {**kept, **more, **ENGINES[engine]}, one.pair)


def is_fixed(method: Method) -> bool:
    """Whether a method drafts a fixed number of tokens per round with the draft model, losslessly."""
    by_model = method.draft is not None and not {"entropy_threshold", "drafter"} & set(method.keywords)
    return by_model and method.kind == "speculative" and isinstance(method.lookahead, int)


class Contest:
    """The races at one batch size, and their outcome.

    Args:
        result: holds the prompts of the batches.
        clock: in seconds.
    """

    def __init__(
        self, result: Result, pairs: Sequence[LoadedPair], batches: Sequence[Batch], clock: Any = time.perf_counter
    ) -> None:
        self.result, self.settings, self.pairs, self.batches = result, result.settings, pairs, batches
        self.clock = clock
        listed = [plain(pairs[0]), *candidates(self.settings, pairs)]
        self.contenders = {one.name: one for one in listed if one.takes(len(batches[0]))}
        self.calls: list[Call] = []
        self.cold: list[ColdStart] = []
        self.notes: list[str] = []
        self.warm = {"plain"}
        self.seconds = 0.0
        self._results: list[tuple[int, list[str]]] = []  # the first repeat and the final ranking of each race
        self._part: Part | None = None

    def run(self, seconds: float) -> None:
        """Compare candidates on the engine that needs no preparation, then the best of them on all engines."""
        start, first = self.clock(), unprepared_engine(self.settings, self.pairs[0])
        engines = [engine for engine in self.settings.engines if engine not in (first, "eager")]
        # Warms up what all share; a target that refuses a setting does so here.
        self._warm_up(self.contenders["plain"], self.batches[0])
        share = _FIRST_SHARE if engines else 1.0
        ranking = self._race(list(self.contenders)[1:], self.batches, start + share * seconds - self.clock())
        if engines and ranking:
            same = _of_one_capacity(self.batches, self.settings.max_new_tokens)
            left = start + seconds - self.clock()
            with keeping_engines(len(engines) * len(ranking), self.pairs[0].target.device):
                ready = self._prepare(engines, ranking, same[0], _PREPARING_SHARE * left)
                lossy = [name for name in ranking if self._lossy(name)]
                finalists = [*ranking[:_FINALISTS], *lossy[:1]] if first in self.settings.engines else []
                self._race(list(dict.fromkeys([*ready, *finalists])), same, start + seconds - self.clock())
        self.seconds = self.clock() - start

    def part(self, first: int = 0) -> Part:
        """The calls from repeat `first` on, renumbered from 0."""
        if self._part is None or len(self._part.calls) != len(self.calls):
            self._part = Part(self.result, frame(self.calls, self.result.prompts))
        calls = self._part.calls[self._part.calls["repeat"] >= first]
        return Part(self.result, calls.assign(repeat=calls["repeat"] - first))

    def _race(self, names: list[str], batches: Sequence[Batch], seconds: float) -> list[str]:
        """Measure and halve candidates; return all that were measured, those that got furthest first."""
        first = 1 + max((call.repeat for call in self.calls), default=-1)
        refused: dict[str, str] = {}

        def measure(name: str, example: int) -> None:
            repeat, place = divmod(example, len(batches))
            try:
                if name not in refused:
                    self._measure(self.contenders[name], batches[place], first + repeat)
            except ValueError as error:
                refused[name] = " ".join(str(error).split())

        def ratio(name: str, base: str) -> Interval | None:
            return speed.speedup(self.part(first), name, base, "end to end")

        rankings = successive_halving(
            names, "plain", measure, ratio, seconds=seconds, group=self._lossy, clock=self.clock
        )
        self._results.append((first, rankings[-1] if rankings else []))
        measured = list(dict.fromkeys(name for ranking in reversed(rankings) for name in ranking))
        self.notes += [f"{self._title(name)}: refused. {why}" for name, why in refused.items()]
        if late := [self._title(name) for name in names if name not in measured and name not in refused]:
            self.notes.append(
                f"Not tried, or on fewer than {ENOUGH} examples, since the time was too short (raise --minutes): "
                f"{_some(late)}"
            )
        return measured

    def _measure(self, one: Contender, batch: Batch, repeat: int) -> None:
        """Time one call. A contender's first call is discarded: passes are recorded in it, and "auto" learns."""
        where = {"repeat": repeat, "position": len(self.calls)}
        if one.name not in self.warm:
            warm_call(one, batch, self.settings, **where)
            self.warm.add(one.name)
        self.calls.append(with_texts(warm_call(one, batch, self.settings, **where), one.pair))

    def _warm_up(self, one: Contender, batch: Batch) -> None:
        self.cold.append(warm_up(one, batch, self.settings, most=_WARM_UPS, number=len(self.cold)))

    def _prepare(self, engines: Sequence[str], ranking: Sequence[str], batch: Batch, seconds: float) -> list[str]:
        """Record, capture or compile candidates on other engines while time allows; return those that are ready."""
        end = self.clock() + seconds
        took: dict[str, float] = {}  # the longest preparation so far: longer lookaheads take longer than the first one
        ready, left_out, without = list[str](), list[str](), set[str]()
        best = [self.contenders[name] for name in ranking]
        # Alternating between engines, so that each has its most promising candidates prepared.
        in_turn = zip_longest(*(on_engine(engine, best) for engine in engines))
        for one in (one for row in in_turn for one in row if one is not None and one.method.engine not in without):
            self.contenders[one.name] = one
            start, engine = self.clock(), one.method.engine
            expected = took.get(engine, _ASSUMED_SECONDS[engine])
            if start + expected > end:
                left_out.append(f"{one.method.title} (about {expected:.0f} s)")
                continue
            try:
                self._warm_up(one, batch)
            except BenchError as error:
                self.notes.append(f"{one.method.title}: refused. {error}")
                continue
            took[engine] = max(self.clock() - start, took.get(engine, 0.0))
            if engine == "compiled" and not kept_engines(one.pair.target, compile=True):
                without.add(engine)
                self.notes.append("compile=True is left out: these models' rounds can't be compiled.")
                continue
            ready.append(one.name)
            self.warm.add(one.name)
        if left_out:
            self.notes.append(f"Left out, since there is no time to prepare them (raise --minutes): {_some(left_out)}")
        return ready

    def choose(self) -> Tuned:
        """Choose by the last race with enough examples for an interval, or else by the last race with a ranking."""
        found = [(self.part(first), ranking) for first, ranking in self._results if ranking]
        sure = [one for one in found if _ratio(one[0], one[1][0]).low is not None]
        if sure and sure[-1] is not found[-1]:
            self.notes.append(
                f"The engines that need preparation were compared on fewer than {ENOUGH} different examples, too few "
                "to count. Raise --minutes or give more prompts."
            )
        part, ranking = (sure or found or [(self.part(), list[str]())])[-1]
        ratios = {name: _ratio(part, name) for name in ranking}
        losses = {name: worst_difference(part, name, "plain") for name in ranking if self._lossy(name)}
        fit = [name for name in ranking if not self._lossy(name) or self._allowed(losses[name])]
        chosen = fit[0] if fit and ratios[fit[0]].faster else None
        near = [name for name in fit[1:] if chosen and not _ratio(part, name, chosen).slower]
        told = {name: None if one is None else Interval(one.value, one.low, one.high) for name, one in losses.items()}
        return Tuned(len(self.batches[0]), self.seconds, chosen, tuple(near), told, tuple(self.notes), ratios)

    def _title(self, name: str) -> str:
        return self.contenders[name].method.title

    def _lossy(self, name: str) -> bool:
        return self.contenders[name].method.kind == "bild"

    def _allowed(self, found: Difference | None) -> bool:
        """Whether a loss beyond `max_quality_loss` is excluded."""
        most = self.settings.max_quality_loss
        return most is not None and found is not None and found.excludes(most)


def _ratio(part: Part, name: str, base: str = "plain") -> Interval:
    """The end-to-end speedup between two ranked candidates, which have examples in common."""
    found = speed.speedup(part, name, base, "end to end")
    assert found is not None
    return found


def _of_one_capacity(batches: Sequence[Batch], new_tokens: int) -> list[Batch]:
    """The largest group of batches that share prepared rounds; each other length would need its own preparation."""
    same: dict[int, list[Batch]] = {}
    for batch in batches:
        longest = max(len(prompt.token_ids) for prompt in batch)
        same.setdefault(prepared_capacity(longest + new_tokens), []).append(batch)
    return max(same.values(), key=len)


def _some(titles: Sequence[str]) -> str:
    """The first three titles and the number of further ones, as text."""
    more = [f"and {len(titles) - 3} more"] if len(titles) > 3 else []
    return "; ".join([*titles[:3], *more])
