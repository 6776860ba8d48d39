"""Runs methods on questions, question by question, and puts every call into the journal before the next."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from hf_specdec.bench.figures.divergence import divergence
from hf_specdec.bench.inputs.prompts import Prompt, question_prompt
from hf_specdec.bench.inputs.questions import Question, split_of
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.bare_passes import BarePasses, keeping_engines, widths_for
from hf_specdec.bench.running.methods import Method
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_call import Call
from hf_specdec.bench.running.turns import turn, turn_number
from hf_specdec.bench.running.warming import warm_call, warm_up
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.journal import Record
from hf_specdec.bench.storage.run_session import RunSession, passes_key

# One turn of as many dialogues as are decoded at once.
Batch = tuple[Question, ...]


@dataclass(frozen=True)
class Contender:
    """A method, and the models that it runs on."""

    method: Method
    pair: LoadedPair


class Collection:
    """The work of one process: its share of the dialogues, every contender on every question, `repeats` times.

    All contenders answer the same prompts: where a question has turns before it, the answers between are those
    that the first contender, plain decoding, gave in the first repeat. Bare passes of every pair are timed, too: of
    each subtask at the batch of middling length, right after its calls, so that they meet the same state of the
    machine.
    """

    def __init__(
        self, settings: Settings, contenders: Sequence[Contender], session: RunSession, processes: Processes
    ) -> None:
        self.settings, self.session, self.processes = settings, session, processes
        self.contenders = [one for one in contenders if one.method.takes(settings.batch_size)]
        self.baseline = contenders[0]
        self._batch_of: dict[int, tuple[int, ...]] = {}

    def run(self, dialogues: Sequence[Sequence[Question]]) -> None:
        """Measures what is not in the journal yet."""
        groups = batches(dialogues, self.settings.batch_size)
        mine = [batch for group in self.processes.share(groups) for batch in group]
        self._batch_of = {question.index: _indexes(batch) for batch in mine for question in batch}
        self._sampled = self._middling(groups)
        work = [(repeat, place, batch) for repeat in range(self.settings.repeats) for place, batch in enumerate(mine)]
        if not all(self._complete(repeat, batch) for repeat, _, batch in work):
            self._warm_up(mine[0])
        bar = tqdm(
            total=len(work) * len(self.contenders),
            initial=sum(self._finished(repeat, batch) for repeat, _, batch in work),
            desc=self.settings.task,
            unit="run",
            file=sys.stderr,
            disable=not self.processes.main,
        )
        with bar:
            for done, (repeat, place, batch) in enumerate(work):
                if not self._complete(repeat, batch):
                    order = turn(self.contenders, turn_number(repeat, place, len(mine), len(self.contenders)))
                    self._all_contenders(repeat, batch, order, done * len(order), bar)

    def gathered(self) -> list[Record]:
        """The records of all processes, in each of them, one of each."""
        mine = [record for record in self.session.records.values() if self._is_mine(record)]
        return self.processes.gather(mine)

    def _is_mine(self, record: Record) -> bool:
        if record["kind"] == "cold":
            return self.processes.main
        index = record["index"] if record["kind"] == "prompt" else record["prompts"][0]
        return index in self._batch_of

    def _middling(self, groups: Sequence[Sequence[Batch]]) -> set[tuple[int, ...]]:
        """For each subtask, the batch whose first prompt has the median length, among first turns."""
        lengths: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        for group in groups:
            prompt = self._prompt(group[0][0], ())[0]
            lengths.setdefault(prompt.label, []).append((len(prompt.token_ids), _indexes(group[0])))
        return {sorted(pairs)[len(pairs) // 2][1] for pairs in lengths.values()}

    def _prompt(self, question: Question, answers: Sequence[str]) -> tuple[Prompt, int]:
        return question_prompt(self.baseline.pair, question, answers, self.settings.max_new_tokens)

    def _warm_up(self, batch: Batch) -> None:
        prompts = [self._prompt(question, ())[0] for question in batch]
        for one in self.contenders:
            self.session.keep_cold(warm_up(one.pair, one.method, prompts, self.settings))

    def _all_contenders(self, repeat: int, batch: Batch, order: Sequence[Contender], position: int, bar: Any) -> None:
        made = [self._prompt(question, self._earlier(question, row)) for row, question in enumerate(batch)]
        prompts = [prompt for prompt, _ in made]
        for number, one in enumerate(order):
            if self.session.has_call(one.method.name, _indexes(batch), repeat):
                continue
            place = {"repeat": repeat, "position": position + number}
            call = warm_call(one.pair, one.method, prompts, self.settings, **place)
            texts = [one.pair.tokenizer.decode(row, skip_special_tokens=True).strip() for row in call.tokens]
            self.session.keep_call(replace(call, texts=texts))
            bar.update()
        for engine, pair in self._unsampled(repeat, batch):
            self._sample_passes(repeat, prompts, engine, pair)
        if repeat == 0:
            for row, (question, (prompt, cut)) in enumerate(zip(batch, made, strict=True)):
                self._describe(question, batch, row, prompt, cut)

    def _earlier(self, question: Question, row: int) -> list[str]:
        """The baseline's answers to the turns before a question."""
        found = []
        for index in question.earlier:
            call = self.session.call(self.baseline.method.name, self._batch_of[index], 0)
            assert call.texts is not None
            found.append(call.texts[row])
        return found

    def _describe(self, question: Question, batch: Batch, row: int, prompt: Prompt, cut: int) -> None:
        divergences = {} if self.settings.sampling else self._divergences(batch, row, prompt)
        described = {
            "index": question.index,
            "question": question.earlier[0] if question.earlier else question.index,
            "label": question.subtask,
            "tokens": len(prompt.token_ids),
            "cut": cut,
            "turn": len(question.turns),
            "references": list(question.references),
            "divergences": divergences,
        }
        self.session.keep("prompt", described)

    def _sample_passes(self, repeat: int, prompts: Sequence[Prompt], engine: str, pair: LoadedPair) -> None:
        widths = widths_for([one.method for one in self.contenders if one.pair is pair])
        times = BarePasses(pair, self.settings.max_new_tokens, widths).sample(engine, prompts)
        about = {
            "engine": engine,
            "draft": pair.draft_name,
            "prompts": [prompt.index for prompt in prompts],
            "batch": len(prompts),
            "length": max(len(prompt.token_ids) for prompt in prompts),
            "repeat": repeat,
        }
        # None where the engine could not be had and rounds ran without it.
        self.session.keep("passes", about | {"times": times or {"draft": {}, "target": {}}})

    def _unsampled(self, repeat: int, batch: Batch) -> list[tuple[str, LoadedPair]]:
        """The engines and pairs whose bare passes are still to be timed at this batch."""
        if _indexes(batch) not in self._sampled:
            return []
        drafting = {id(one.pair): one.pair for one in self.contenders if one.pair.draft is not None}
        pairs = list(drafting.values()) or [self.baseline.pair]
        wanted = [
            (engine, pair)
            for pair in pairs
            for engine in dict.fromkeys(one.method.engine for one in self.contenders if one.pair is pair)
        ]
        return [
            (engine, pair)
            for engine, pair in wanted
            if passes_key(engine, pair.draft_name, _indexes(batch), repeat) not in self.session.records
        ]

    def _divergences(self, batch: Batch, row: int, prompt: Prompt) -> dict[str, Any]:
        """Of each contender whose greedy output leaves the baseline's: where, and by which margin of logits."""
        reference = self._call(batch, self.baseline).tokens[row]
        ids = torch.tensor([prompt.token_ids], device=self.baseline.pair.target.device)
        found = {}
        for one in self.contenders[1:]:
            tokens = self._call(batch, one).tokens[row]
            found_here = divergence(self.baseline.pair.target, {"input_ids": ids}, tokens, reference)
            if found_here is not None:
                found[one.method.name] = asdict(found_here)
        return found

    def _call(self, batch: Batch, one: Contender) -> Call:
        return self.session.call(one.method.name, _indexes(batch), 0)

    def _finished(self, repeat: int, batch: Batch) -> int:
        return sum(self.session.has_call(one.method.name, _indexes(batch), repeat) for one in self.contenders)

    def _complete(self, repeat: int, batch: Batch) -> bool:
        described = repeat > 0 or all(("prompt", question.index) in self.session.records for question in batch)
        return (
            described and self._finished(repeat, batch) == len(self.contenders) and not self._unsampled(repeat, batch)
        )


def batches(dialogues: Sequence[Sequence[Question]], size: int) -> list[list[Batch]]:
    """Up to `size` dialogues of one subtask and number of turns, turn by turn: `[group][turn][row]`."""
    same: dict[tuple[str, int], list[Sequence[Question]]] = {}
    for dialogue in dialogues:
        same.setdefault((dialogue[0].subtask, len(dialogue)), []).append(dialogue)
    groups = [some[start : start + size] for some in same.values() for start in range(0, len(some), size)]
    return [list(zip(*group, strict=True)) for group in sorted(groups, key=lambda group: group[0][0].index)]


def collect(
    settings: Settings, contenders: Sequence[Contender], dialogues: Sequence[Sequence[Question]], shared: Processes
) -> dict[str, Any] | None:
    """All calls of all processes as the dict that the JSON will hold; None in all processes but the main one.

    What an earlier start with the same arguments left unfinished is continued.

    Raises:
        BenchError: the output folder can't be used, or holds a run of this name with other arguments.
    """
    session = RunSession(settings, shared)
    collection = Collection(settings, contenders, session, shared)
    with keeping_engines(len(contenders), contenders[0].pair.target.device):
        collection.run(dialogues)
    records = collection.gathered()
    if not shared.main:
        return None
    methods = [one.method for one in collection.contenders]
    result = results.new(settings, contenders[0].pair, methods, [])
    for one in collection.contenders:
        result["loading_seconds"] |= dict(one.pair.loading_seconds)
    result["split"] = split_of(settings)
    result["processes"] = shared.count
    session.conclude(result, records)
    cut = [prompt for prompt in result["prompts"] if prompt["cut"]]
    if cut:
        result["notes"].append(
            f"{len(cut)} of {len(result['prompts'])} prompts were longer than the context and cut on the left, "
            f"by {min(p['cut'] for p in cut)} to {max(p['cut'] for p in cut)} tokens."
        )
    return result


def _indexes(batch: Batch) -> tuple[int, ...]:
    return tuple(question.index for question in batch)
