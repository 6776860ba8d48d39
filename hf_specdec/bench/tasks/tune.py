"""The task `tune`: which draft, strategy, settings and engine are fastest on these prompts, within a given time."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import ENOUGH, Interval, Ratio
from hf_specdec.bench.figures.loss import worst_difference
from hf_specdec.bench.figures.quality import Difference, questions_needed
from hf_specdec.bench.figures.races import deciding_race
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.inputs.prompts import Prompt, question_prompt
from hf_specdec.bench.models.known_pairs import known_drafts
from hf_specdec.bench.models.loading import LoadedPair, load_pair, load_pairs
from hf_specdec.bench.reports.tables import tune as tune_tables
from hf_specdec.bench.running.bare_passes import keeping_engines
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.timed_call import Call
from hf_specdec.bench.running.warming import ColdStart, warm_call, warm_up
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import generation_config, results
from hf_specdec.bench.storage.columns import rounded
from hf_specdec.bench.tasks.collecting import Contender
from hf_specdec.bench.tasks.halving import Stage, overall_ranking, successive_halving
from hf_specdec.bench.tasks.sweep import drafts_of
from hf_specdec.bench.tasks.tune_candidates import candidates, on_engine, unprepared_engine
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


def run_tune(settings: Settings) -> None:
    """Measures for `settings.minutes`; writes JSON, markdown, pictures and a generation_config.json; prints the choice.

    Raises `BenchError` for what the user can put right.
    """
    end = time.perf_counter() + 60 * settings.minutes
    results.check_output(settings)
    dialogues = questions.dialogues(settings)
    pairs = _pairs(settings)
    prompts = _prompts(settings, pairs[0], [dialogue[0] for dialogue in dialogues])
    sizes = settings.batch_sizes
    contests = []
    for number, size in enumerate(sizes):
        contests.append(Contest(settings, pairs, _batches(prompts, size)))
        contests[-1].run((end - time.perf_counter()) / (len(sizes) - number))
    result = _result(settings, pairs, prompts, contests)
    folder = settings.output_dir
    for tuned, contest in zip(result["tuned"], contests, strict=True):
        if tuned["choice"] is not None:
            keywords = contest.contenders[tuned["choice"]].method.keywords
            path = folder / f"{results.stem(settings)}-batch-{tuned['batch']}" / generation_config.NAME
            generation_config.save(pairs[0].target, keywords, path)
    results.save(result, settings)
    results.save_pictures(result, settings)
    sys.stdout.write(tune_tables.terminal(result, folder / results.stem(settings)))


class Race:
    """Calls of contenders on batches of prompts, as `successive_halving` asks for them."""

    def __init__(
        self,
        settings: Settings,
        contenders: dict[str, Contender],
        batches: Sequence[Batch],
        clock: Clock,
        warm: set[str],
    ) -> None:
        self.settings, self.contenders, self.batches, self.clock = settings, contenders, batches, clock
        self.warm = warm  # the names of those that have been called before
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
                warm_call(one.pair, one.method, self.batches[place], self.settings, **where)
                self.warm.add(name)
            call = warm_call(one.pair, one.method, self.batches[place], self.settings, **where)
        except ValueError as error:
            self.refused[name] = " ".join(str(error).split())
            return
        texts = [one.pair.tokenizer.decode(row, skip_special_tokens=True).strip() for row in call.tokens]
        self.calls.append(replace(call, texts=texts))

    def ratio(self, ours: str, base: str) -> Ratio | None:
        """Of their rates end to end, with an interval to decide by."""
        prompts = [{"index": prompt.index} for batch in self.batches for prompt in batch]
        return speed.speedup({"calls": self.calls, "prompts": prompts}, ours, base, by="end to end", deciding=True)

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
        settings: Settings,
        pairs: Sequence[LoadedPair],
        batches: Sequence[Batch],
        clock: Clock = time.perf_counter,
    ) -> None:
        self.settings, self.pairs, self.batches, self.clock = settings, pairs, batches, clock
        self.engine = unprepared_engine(settings, pairs[0])
        base = Contender(plain(), pairs[0])
        listed = [base, *candidates(settings, pairs)]
        self.contenders = {one.method.name: one for one in listed if one.method.takes(len(batches[0]))}
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
        self.cold.append(warm_up(self.pairs[0], plain(), self.batches[0], self.settings, most=_WARM_UPS))
        share = _FIRST_SHARE if engines else 1.0
        self._race(list(self.contenders)[1:], self.batches, start + share * seconds - self.clock())
        ranking = overall_ranking(self.races[0][1])
        if engines and ranking:
            same = _of_one_capacity(self.batches, self.settings.max_new_tokens)
            left = start + seconds - self.clock()
            with keeping_engines(len(engines) * len(ranking), self.pairs[0].target.device):
                ready = self._prepare(engines, ranking, same[0], _PREPARING_SHARE * left)
                lossy = [name for name in ranking if self.contenders[name].method.kind in _LOSSY]
                finalists = [*ranking[:_FINALISTS], *lossy[:1]] if self.engine in self.settings.engines else []
                names = dict.fromkeys([*ready, *finalists])
                self._race(list(names), same, start + seconds - self.clock())
        self.seconds = self.clock() - start

    def _race(self, names: list[str], batches: Sequence[Batch], seconds: float) -> None:
        race = Race(self.settings, self.contenders, batches, self.clock, self.warm)
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
            self.contenders[one.method.name] = one
            start, engine = self.clock(), one.method.engine
            if start + predicted[engine] > end:
                if predicted[engine] < math.inf:
                    left_out.append(f"{one.method.title} (about {predicted[engine]:.0f} s)")
                continue
            try:
                self.cold.append(warm_up(one.pair, one.method, batch, self.settings, most=_WARM_UPS))
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
            ready.append(one.method.name)
            self.warm.add(one.method.name)
        if left_out:
            self.notes.append(
                f"Left out, since the time does not pay for preparing them (raise --minutes): {_some(left_out)}"
            )
        return ready

    def _title(self, name: str) -> str:
        return self.contenders[name].method.title

    def choose(self, references: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What reports need: the stages, losses, the choice (None for plain decoding), and what was as fast."""
        races = [[_stored(stage) for stage in stages] for _, stages in self.races]
        number = deciding_race(races)
        race, stages = self.races[-1 if number is None else number]
        view = {"calls": race.calls, "prompts": references, "sampling": self.settings.sampling}
        ranking = list(stages[-1].kept) if stages else []
        losses = {name: worst_difference(view, name, "plain") for name in ranking if self._lossy(name)}
        fit = [name for name in ranking if not self._lossy(name) or self._allowed(losses[name])]
        chosen = fit[0] if fit and stages[-1].ratios[fit[0]].faster else None
        near = [name for name in fit[1:] if chosen and (found := race.ratio(name, chosen)) and not found.slower]
        return {
            "batch": len(self.batches[0]),
            "seconds": self.seconds,
            "choice": chosen,
            "near": near,
            "losses": {name: None if found is None else _ends(found) for name, found in losses.items()},
            "notes": [*self.notes, *self._too_few(race, losses)],
            "races": races,
        }

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


def _pairs(settings: Settings) -> list[LoadedPair]:
    """The target with each of its drafts; alone where none is named or known."""
    if settings.draft_models or settings.assistant_model or known_drafts(settings.model_name):
        return load_pairs(settings, drafts_of(settings))
    print("No draft is known for the target: only methods without one are tried; name one by --assistant_model")
    return [load_pair(replace(settings, assisted_generation=False))]


def _prompts(settings: Settings, pair: LoadedPair, asked: Sequence[questions.Question]) -> list[dict[str, Any]]:
    """First turns, the subtasks in turn, so that the first few already are of every kind."""
    seen: dict[str, int] = {}
    ordered = []
    for question in asked:
        seen[question.subtask] = seen.get(question.subtask, 0) + 1
        prompt, cut = question_prompt(pair, question, (), settings.max_new_tokens)
        ordered.append((seen[question.subtask], question.index, {"prompt": prompt, "cut": cut, "question": question}))
    return [about for *_, about in sorted(ordered, key=lambda item: item[:2])]


def _batches(prompts: Sequence[dict[str, Any]], size: int) -> list[Batch]:
    """Full batches in this order; the prompts again and again where there are fewer than a batch holds."""
    listed = [about["prompt"] for about in prompts]
    listed *= -(-size // len(listed))
    return [tuple(listed[start : start + size]) for start in range(0, len(listed) - size + 1, size)]


def _of_one_capacity(batches: Sequence[Batch], new_tokens: int) -> list[Batch]:
    """The batches whose texts share prepared rounds with most others: each other length would be prepared anew."""
    same: dict[int, list[Batch]] = {}
    for batch in batches:
        longest = max(len(prompt.token_ids) for prompt in batch)
        same.setdefault(prepared_capacity(longest + new_tokens), []).append(batch)
    return max(same.values(), key=len)


def _result(
    settings: Settings, pairs: Sequence[LoadedPair], prompts: Sequence[dict[str, Any]], contests: Sequence[Contest]
) -> dict[str, Any]:
    described = [
        {
            "index": about["prompt"].index,
            "question": about["prompt"].index,
            "label": about["prompt"].label,
            "tokens": len(about["prompt"].token_ids),
            "cut": about["cut"],
            "references": list(about["question"].references),
        }
        for about in prompts
    ]
    contenders = {name: one for contest in contests for name, one in contest.contenders.items()}
    result = results.new(settings, pairs[0], [one.method for one in contenders.values()], [])
    for pair in pairs:
        result["loading_seconds"] |= rounded(dict(pair.loading_seconds))
    result["prompts"] = sorted(described, key=lambda prompt: int(prompt["index"]))
    result["split"] = questions.split_of(settings)
    result["calls"] = [call for contest in contests for call in contest.calls()]
    result["cold"] = rounded([asdict(cold) for contest in contests for cold in contest.cold])
    result["encoder_decoder"] = pairs[0].encoder_decoder
    result["tuned"] = rounded([contest.choose(described) for contest in contests])
    return result


def _stored(stage: Stage) -> dict[str, Any]:
    return {
        "entered": list(stage.entered),
        "kept": list(stage.kept),
        "examples": stage.examples,
        "ratios": {name: _ends(found) for name, found in stage.ratios.items()},
    }


def _some(titles: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    more = [f"and {len(titles) - 3} more"] if len(titles) > 3 else []
    return "; ".join([*titles[:3], *more])


def _ends(found: Interval) -> list[float | None]:
    return [found.value, found.low, found.high]
