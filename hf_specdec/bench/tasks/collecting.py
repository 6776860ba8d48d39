"""Runs contenders on questions, question by question, and puts every run into the journal before the next."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from hf_specdec.bench.figures.quality import divergence
from hf_specdec.bench.figures.speed import pooled_forwards
from hf_specdec.bench.inputs.prompts import Prompt, question_prompt
from hf_specdec.bench.inputs.questions import Question, split_of
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.bare_passes import RawForwards
from hf_specdec.bench.running.methods import Method
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_call import run_once, warm_up
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.journal import Record
from hf_specdec.bench.storage.run_session import RunSession, forwards_key, run_key

# Times are kept to a tenth of a microsecond: what lies below is noise, and takes most of the file.
_DIGITS = 7
_FORWARD_SAMPLES = 2


@dataclass(frozen=True)
class Contender:
    """A method, and the models that it runs on."""

    method: Method
    pair: LoadedPair


class Collection:
    """The work of one process: its share of the dialogues, every contender on every question, `repeats` times.

    All contenders answer the same prompts: where a question has turns before it, the answers between are those
    that the first contender, plain decoding, gave in the first repeat. With a `lookahead`, bare forward passes of
    every pair are timed, too: of each subtask at the question of middling length, right after its runs, so that
    they meet the same state of the machine.
    """

    def __init__(
        self,
        settings: Settings,
        contenders: Sequence[Contender],
        sitting: RunSession,
        processes: Processes,
        lookahead: int | None,
    ) -> None:
        self.settings, self.contenders, self.sitting, self.processes = settings, contenders, sitting, processes
        self.baseline = contenders[0]
        self._lookahead = lookahead
        self._pairs = list({id(c.pair): c.pair for c in contenders if c.pair.draft is not None}.values())
        self._done = sitting.done
        self._mine: set[int] = set()
        self._sampled: set[int] = set()

    def run(self, dialogues: Sequence[Sequence[Question]]) -> None:
        """Measures what is not in the journal yet."""
        mine = [question for dialogue in self.processes.share(dialogues) for question in dialogue]
        self._mine = {question.index for question in mine}
        if self._lookahead is not None:
            self._sampled = self._middling(dialogues)
        work = [(repeat, question) for repeat in range(self.settings.repeats) for question in mine]
        if not all(self._complete(repeat, question) for repeat, question in work):
            self._warm_up(mine[0])
        bar = tqdm(
            total=len(work) * len(self.contenders),
            initial=sum(self._finished(repeat, question) for repeat, question in work),
            desc=self.settings.task,
            unit="run",
            file=sys.stderr,
            disable=not self.processes.main,
        )
        with bar:
            for place, (repeat, question) in enumerate(work):
                if not self._complete(repeat, question):
                    self._all_contenders(repeat, question, place * len(self.contenders), bar)

    def gathered(self) -> list[Record]:
        """The records of all processes, in each of them."""
        return self.processes.gather([r for r in self._done.values() if r.get("prompt", r.get("index")) in self._mine])

    def _middling(self, dialogues: Sequence[Sequence[Question]]) -> set[int]:
        """Of each subtask the index of the question whose prompt is of middling length, among first turns."""
        lengths: dict[str, list[tuple[int, int]]] = {}
        for dialogue in dialogues:
            prompt = self._first_prompt(dialogue)
            lengths.setdefault(prompt.label, []).append((len(prompt.token_ids), prompt.index))
        return {sorted(pairs)[len(pairs) // 2][1] for pairs in lengths.values()}

    def _first_prompt(self, dialogue: Sequence[Question]) -> Prompt:
        return question_prompt(self.baseline.pair, dialogue[0], (), self.settings.max_new_tokens)[0]

    def _warm_up(self, question: Question) -> None:
        prompt = self._first_prompt([question])
        for contender in self.contenders:
            warm_up(contender.pair, [contender.method], [prompt], self.settings)

    def _all_contenders(self, repeat: int, question: Question, position: int, bar: Any) -> None:
        answers = [self._run(index, self.baseline)["text"] for index in question.earlier]
        prompt, cut = question_prompt(self.baseline.pair, question, answers, self.settings.max_new_tokens)
        # The one that begins changes, so that none always follows the same other.
        shift = (repeat + question.index) % len(self.contenders)
        for number, contender in enumerate([*self.contenders[shift:], *self.contenders[:shift]]):
            if run_key(repeat, question.index, contender.method.name) in self._done:
                continue
            place = position + number
            run = run_once(contender.pair, contender.method, prompt, self.settings, repeat=repeat, position=place)
            text = contender.pair.tokenizer.decode(run.tokens, skip_special_tokens=True).strip()
            # Rates need the first delivery only; a round's own seconds say when later ones came.
            self.sitting.keep({"kind": "run", **rounded(vars(run) | {"puts": run.puts[:1]}), "text": text})
            bar.update()
        for pair in self._unsampled(repeat, question):
            self._sample_forwards(repeat, prompt, pair)
        if repeat == 0:
            described = {"label": question.subtask, "tokens": len(prompt.token_ids), "cut": cut}
            more = {"turn": len(question.turns), "references": list(question.references)}
            divergences = {} if self.settings.sampling else self._divergences(prompt)
            self.sitting.keep(
                {"kind": "prompt", "index": question.index, **described, **more, "divergences": divergences}
            )

    def _sample_forwards(self, repeat: int, prompt: Prompt, pair: LoadedPair) -> None:
        assert self._lookahead is not None
        forwards = RawForwards(pair, self._lookahead, self.settings.max_new_tokens)
        times = pooled_forwards([forwards.sample(prompt) for _ in range(_FORWARD_SAMPLES)])
        about = {"kind": "forwards", "repeat": repeat, "prompt": prompt.index, "draft": pair.draft_name}
        self.sitting.keep(about | {"label": prompt.label, "times": rounded(times)})

    def _unsampled(self, repeat: int, question: Question) -> list[LoadedPair]:
        """The pairs whose bare passes are still to be timed at this question."""
        if question.index not in self._sampled:
            return []
        keys = {pair.draft_name: forwards_key(repeat, question.index, pair.draft_name) for pair in self._pairs}
        return [pair for pair in self._pairs if keys[pair.draft_name] not in self._done]

    def _divergences(self, prompt: Prompt) -> dict[str, Any]:
        """Of each contender whose greedy output leaves the baseline's: where, and by which margin of logits."""
        reference: list[int] = self._run(prompt.index, self.baseline)["tokens"]
        ids = torch.tensor([prompt.token_ids], device=self.baseline.pair.target.device)
        found = {}
        for contender in self.contenders[1:]:
            tokens: list[int] = self._run(prompt.index, contender)["tokens"]
            found_here = divergence(self.baseline.pair.target, {"input_ids": ids}, tokens, reference)
            if found_here is not None:
                found[contender.method.name] = rounded(asdict(found_here))
        return found

    def _run(self, index: int, contender: Contender) -> Record:
        return self._done[run_key(0, index, contender.method.name)]

    def _finished(self, repeat: int, question: Question) -> int:
        return sum(run_key(repeat, question.index, c.method.name) in self._done for c in self.contenders)

    def _complete(self, repeat: int, question: Question) -> bool:
        # The prompt's own record is written after its runs.
        described = repeat > 0 or ("prompt", question.index) in self._done
        runs = self._finished(repeat, question) == len(self.contenders)
        return described and runs and not self._unsampled(repeat, question)


def rounded(value: Any) -> Any:
    """The same data with its floats rounded."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def collect(
    settings: Settings,
    contenders: Sequence[Contender],
    dialogues: Sequence[Sequence[Question]],
    shared: Processes,
    lookahead: int | None,
) -> dict[str, Any] | None:
    """All runs of all processes as the dict that the JSON will hold; None in all processes but the main one.

    What an earlier start with the same arguments left unfinished is continued. `lookahead` is that of the widest
    verification among the contenders; None, where bare forward passes aren't wanted.

    Raises:
        BenchError: the output folder can't be used, or holds an unfinished run with other arguments.
    """
    sitting = RunSession(settings, shared)
    collection = Collection(settings, contenders, sitting, shared, lookahead)
    collection.run(dialogues)
    records = collection.gathered()
    if not shared.main:
        return None
    methods = [contender.method for contender in contenders]
    result = results.new(settings, contenders[0].pair, methods, [])
    result |= results.from_records(records, result["methods"])
    result["split"] = split_of(settings)
    result["processes"] = shared.count
    sitting.conclude(result)
    cut = [prompt for prompt in result["prompts"] if prompt["cut"]]
    if cut:
        result["notes"].append(
            f"{len(cut)} of {len(result['prompts'])} prompts were longer than the context and cut on the left, "
            f"by {min(p['cut'] for p in cut)} to {max(p['cut'] for p in cut)} tokens."
        )
    return result
