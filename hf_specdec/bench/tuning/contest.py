"""The races at one batch size: which candidates are measured, and what is chosen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import ENOUGH
from hf_specdec.bench.figures.frames import Part, frame
from hf_specdec.bench.figures.quality import Difference, questions_needed, worst_difference
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Call, ColdStart, Interval, Result, Stage, Tuned
from hf_specdec.bench.running.bare_passes import keeping_engines
from hf_specdec.bench.running.methods import Contender, plain
from hf_specdec.bench.running.warming import warm_call, warm_up
from hf_specdec.bench.settings import BenchError
from hf_specdec.bench.tuning.candidates import candidates, on_engine, unprepared_engine
from hf_specdec.bench.tuning.halving import overall_ranking, successive_halving
from hf_specdec.prepared.engine import prepared_capacity
from hf_specdec.prepared.engine_store import kept_engines

Batch = tuple[Prompt, ...]
Clock = Callable[[], float]  # in seconds

_FIRST_SHARE = 0.4  # of the time, for the engine that needs no preparation, where others follow
_PREPARING_SHARE = 0.5  # of what is left then, for preparing the other engines
_ASSUMED_SECONDS = {"static": 5.0, "compiled": 30.0}  # to prepare a candidate, before one has been
_WARM_UPS = 2  # calls; what is prepared later is not measured either
_FINALISTS = 3  # of the first engine that meet those of the others
_LOSSY = ("bild",)


def deciding_race(races: Sequence[Sequence[Stage]]) -> int | None:
    """The number of the last race that measured enough examples for an interval, else of the last that ranks any.

    A later race has what is prepared, too, but its time may be too short. None where no race ranks any.
    """
    ranked = [number for number, stages in enumerate(races) if stages and stages[-1].kept]
    sure = [n for n in ranked if any(races[n][-1].ratios[name].low is not None for name in races[n][-1].kept)]
    return max(sure or ranked, default=None)


class Race:
    """Calls of contenders on batches of prompts, as `successive_halving` asks for them.

    Args:
        result: its prompts are those of the batches.
        warm: the names of the contenders that have been called before.
    """

    def __init__(
        self, result: Result, contenders: dict[str, Contender], batches: Sequence[Batch], clock: Clock, warm: set[str]
    ) -> None:
        self.result, self.contenders, self.batches, self.clock = result, contenders, batches, clock
        self.warm = warm
        self.calls: list[Call] = []
        self.refused: dict[str, str] = {}

    def measure(self, name: str, example: int) -> None:
        """One call on the batch with this number, counted on into the repeats; what refuses has no measurement.

        A contender's very first call is not measured: passes are recorded in it, and "auto" learns.
        """
        repeat, place = divmod(example, len(self.batches))
        one, where = self.contenders[name], {"repeat": repeat, "position": len(self.calls)}
        try:
            if name not in self.warm:
                warm_call(one, self.batches[place], self.result.settings, **where)
                self.warm.add(name)
            call = warm_call(one, self.batches[place], self.result.settings, **where)
        except ValueError as error:
            self.refused[name] = " ".join(str(error).split())
            return
        decode = one.pair.tokenizer.decode
        texts = tuple(decode(row, skip_special_tokens=True).strip() for row in call.tokens or ())
        self.calls.append(replace(call, texts=texts))

    @property
    def part(self) -> Part:
        """The calls so far."""
        return Part(self.result, frame(self.calls, self.result.prompts))

    def ratio(self, ours: str, base: str) -> Interval | None:
        """Of their rates end to end."""
        return speed.speedup(self.part, ours, base, "end to end")

    def run(self, names: Sequence[str], seconds: float) -> list[Stage]:
        """The stages of the race; the fastest lossless and the fastest lossy candidate stay to the end."""
        return successive_halving(
            names, "plain", self.measure, self.ratio, seconds=seconds, clock=self.clock,
            group=lambda name: "lossy" if self.contenders[name].method.kind in _LOSSY else "lossless",
        )  # fmt: skip


class Contest:
    """All races at one batch size, and their outcome."""

    def __init__(
        self,
        result: Result,
        pairs: Sequence[LoadedPair],
        batches: Sequence[Batch],
        clock: Clock = time.perf_counter,
    ) -> None:
        self.result, self.settings, self.pairs, self.clock = result, result.settings, pairs, clock
        self.batches = batches
        self.engine = unprepared_engine(self.settings, pairs[0])
        listed = [plain(pairs[0]), *candidates(self.settings, pairs)]
        self.contenders = {one.name: one for one in listed if one.takes(len(batches[0]))}
        self.races: list[tuple[Race, list[Stage]]] = []
        self.cold: list[ColdStart] = []
        self.notes: list[str] = []
        self.warm = {"plain"}
        self.seconds = 0.0

    def run(self, seconds: float) -> None:
        """Compares on the engine that needs no preparation, then the best of it with what they become on others."""
        start = self.clock()
        engines = [engine for engine in self.settings.engines if engine != self.engine]
        # Warms up what all share; here the target refuses what it can't do.
        self._warm_up(self.contenders["plain"], self.batches[0])
        share = _FIRST_SHARE if engines else 1.0
        self._race(list(self.contenders)[1:], self.batches, start + share * seconds - self.clock())
        ranking = overall_ranking(self.races[0][1])
        if engines and ranking:
            same = _of_one_capacity(self.batches, self.settings.max_new_tokens)
            left = start + seconds - self.clock()
            with keeping_engines(len(engines) * len(ranking), self.pairs[0].target.device):
                ready = self._prepare(engines, ranking, same[0], _PREPARING_SHARE * left)
                lossy = [name for name in ranking if self._lossy(name)]
                finalists = [*ranking[:_FINALISTS], *lossy[:1]] if self.engine in self.settings.engines else []
                names = dict.fromkeys([*ready, *finalists])
                self._race(list(names), same, start + seconds - self.clock())
        self.seconds = self.clock() - start

    def _warm_up(self, one: Contender, batch: Batch) -> None:
        self.cold.append(warm_up(one, batch, self.settings, most=_WARM_UPS, number=len(self.cold)))

    def _race(self, names: list[str], batches: Sequence[Batch], seconds: float) -> None:
        race = Race(self.result, self.contenders, batches, self.clock, self.warm)
        stages = race.run(names, seconds)
        self.races.append((race, stages))
        untried = [name for name in names if not any(name in stage.ratios for stage in stages)]
        self.notes += [f"{self._title(name)}: refused. {why}" for name, why in race.refused.items()]
        if late := [self._title(name) for name in untried if name not in race.refused]:
            self.notes.append(
                f"Not tried, or on fewer than {ENOUGH} examples, since the time was too short (raise --minutes): "
                f"{_some(late)}"
            )

    def _prepare(self, engines: Sequence[str], ranking: Sequence[str], batch: Batch, seconds: float) -> list[str]:
        """Records, captures or compiles candidates on other engines while the time allows; returns the ready ones."""
        end = self.clock() + seconds
        predicted, ready, left_out = dict(_ASSUMED_SECONDS), list[str](), list[str]()
        best = [self.contenders[name] for name in ranking]
        # In turn, so that each engine has its most promising ones prepared.
        in_turn = zip_longest(*(on_engine(engine, best) for engine in engines))
        for one in (one for row in in_turn for one in row if one is not None):
            self.contenders[one.name] = one
            start, engine = self.clock(), one.method.engine
            if start + predicted[engine] > end:
                if predicted[engine] < math.inf:
                    left_out.append(f"{one.method.title} (about {predicted[engine]:.0f} s)")
                continue
            try:
                self._warm_up(one, batch)
            except BenchError as error:
                self.notes.append(f"{one.method.title}: refused. {error}")
                continue
            # The costliest so far: a longer lookahead takes longer than the first one.
            first = not any(self.contenders[name].method.engine == engine for name in ready)
            predicted[engine] = max(self.clock() - start, 0.0 if first else predicted[engine])
            if engine == "compiled" and not kept_engines(one.pair.target, compile=True):
                predicted[engine] = math.inf
                self.notes.append("compile=True is left out: these models' rounds can't be compiled.")
                continue
            ready.append(one.name)
            self.warm.add(one.name)
        if left_out:
            self.notes.append(
                f"Left out, since the time does not pay for preparing them (raise --minutes): {_some(left_out)}"
            )
        return ready

    def _title(self, name: str) -> str:
        return self.contenders[name].method.title

    def choose(self) -> Tuned:
        """The outcome."""
        races = [stages for _, stages in self.races]
        number = deciding_race(races)
        race, stages = self.races[-1 if number is None else number]
        ranking = list(stages[-1].kept) if stages else []
        losses = {name: worst_difference(race.part, name, "plain") for name in ranking if self._lossy(name)}
        fit = [name for name in ranking if not self._lossy(name) or self._allowed(losses[name])]
        chosen = fit[0] if fit and stages[-1].ratios[fit[0]].faster else None
        near = [name for name in fit[1:] if chosen and (found := race.ratio(name, chosen)) and not found.slower]
        return Tuned(
            len(self.batches[0]),
            self.seconds,
            chosen,
            tuple(near),
            {name: None if one is None else Interval(one.value, one.low, one.high) for name, one in losses.items()},
            (*self.notes, *self._too_few(race, losses)),
            tuple(map(tuple, races)),
        )

    def calls(self) -> list[Call]:
        """Of all races, their repeats counted on."""
        found: list[Call] = []
        for race, _ in self.races:
            repeats = 1 + max((call.repeat for call in found), default=-1)
            found += [replace(call, repeat=call.repeat + repeats) for call in race.calls]
        return found

    def _lossy(self, name: str) -> bool:
        return self.contenders[name].method.kind in _LOSSY

    def _allowed(self, found: Difference | None) -> bool:
        """Whether a greater loss than is allowed is excluded."""
        most = self.settings.max_quality_loss
        return most is not None and found is not None and found.excludes(most)

    def _too_few(self, race: Race, losses: Mapping[str, Difference | None]) -> list[str]:
        """A note if lossy candidates were refused on questions too few for a loss to be excluded."""
        most = self.settings.max_quality_loss
        refused = {name for name, found in losses.items() if found is not None and not self._allowed(found)}
        judged = len({index for call in race.calls if call.method in refused for index in call.prompts})
        if most is None or not refused or judged >= (needed := questions_needed(most)):
            return []
        takes = f"that takes {needed} questions where no answer changes" if most else "no number of questions can"
        words = f"A loss of more than {most:g} points could not be excluded for lossy candidates: {takes}"
        return [f"{words}; {judged} were answered (raise --limit and --minutes, or --max_quality_loss)."]


def _of_one_capacity(batches: Sequence[Batch], new_tokens: int) -> list[Batch]:
    """The batches whose texts share prepared rounds with most others: each other length would be prepared anew."""
    same: dict[int, list[Batch]] = {}
    for batch in batches:
        longest = max(len(prompt.token_ids) for prompt in batch)
        same.setdefault(prepared_capacity(longest + new_tokens), []).append(batch)
    return max(same.values(), key=len)


def _some(titles: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    more = [f"and {len(titles) - 3} more"] if len(titles) > 3 else []
    return "; ".join([*titles[:3], *more])
