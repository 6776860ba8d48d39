"""Runs contenders on questions, question by question, and puts every run into the journal before the next."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from hf_specdec.bench import environment, results
from hf_specdec.bench.data import Prompt, question_prompt
from hf_specdec.bench.datasets import Question
from hf_specdec.bench.journal import Journal, Record, discard
from hf_specdec.bench.loading import LoadedPair
from hf_specdec.bench.measure import run_once, warm_up
from hf_specdec.bench.methods import Method
from hf_specdec.bench.processes import Processes
from hf_specdec.bench.quality import divergence
from hf_specdec.bench.raw_forwards import RawForwards
from hf_specdec.bench.settings import Settings

# Times are kept to a tenth of a microsecond: what lies below is noise, and takes most of the file.
_DIGITS = 7
_FORWARD_SAMPLES = 5


@dataclass(frozen=True)
class Contender:
    """A method, and the models that it runs on."""

    method: Method
    pair: LoadedPair


class Collection:
    """The work of one process: its share of the dialogues, every contender on every question, `repeats` times.

    All contenders answer the same prompts: where a question has turns before it, the answers between are those
    that the first contender, plain decoding, gave in the first repeat.
    """

    def __init__(
        self, settings: Settings, contenders: Sequence[Contender], journal: Journal, processes: Processes
    ) -> None:
        self.settings, self.contenders, self.journal, self.processes = settings, contenders, journal, processes
        self.baseline = contenders[0]
        self._done = {_key(record): record for record in journal.records}
        self._mine: set[int] = set()

    def run(self, dialogues: Sequence[Sequence[Question]]) -> None:
        """Measures what is not in the journal yet."""
        mine = [question for dialogue in self.processes.share(dialogues) for question in dialogue]
        self._mine = {question.index for question in mine}
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

    def sample_forwards(self, dialogues: Sequence[Sequence[Question]], lookahead: int) -> None:
        """Bare forward passes of every pair at a prompt of middling length, once a repeat; by the main process."""
        if not self.processes.main:
            return
        prompts = [self._first_prompt(dialogue) for dialogue in dialogues]
        prompt = sorted(prompts, key=lambda item: len(item.token_ids))[len(prompts) // 2]
        for pair in {id(contender.pair): contender.pair for contender in self.contenders}.values():
            if pair.draft is None:
                continue
            for repeat in range(self.settings.repeats):
                key = {"kind": "forwards", "draft": pair.draft_name, "repeat": repeat}
                if _key(key) in self._done:
                    continue
                forwards = RawForwards(pair, lookahead, self.settings.max_new_tokens)
                for _ in range(_FORWARD_SAMPLES):
                    forwards.sample(prompt)
                self._keep(key | rounded({"times": forwards.times[str(len(prompt.token_ids))]}))

    def gathered(self) -> list[Record]:
        """The records of all processes, in each of them."""
        forwards = [r for r in self.journal.records if r["kind"] == "forwards"] if self.processes.main else []
        mine = [r for r in self.journal.records if r.get("prompt", r.get("index")) in self._mine]
        return self.processes.gather([*mine, *forwards])

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
            if _run_key(repeat, question.index, contender) in self._done:
                continue
            place = position + number
            run = run_once(contender.pair, contender.method, prompt, self.settings, repeat=repeat, position=place)
            text = contender.pair.tokenizer.decode(run.tokens, skip_special_tokens=True).strip()
            # Rates need the first delivery only; a round's own seconds say when later ones came.
            self._keep({"kind": "run", **rounded(vars(run) | {"puts": run.puts[:1]}), "text": text})
            bar.update()
        if repeat == 0:
            described = {"label": question.subtask, "tokens": len(prompt.token_ids), "cut": cut}
            more = {"turn": len(question.turns), "references": list(question.references)}
            divergences = {} if self.settings.sampling else self._divergences(prompt)
            self._keep({"kind": "prompt", "index": question.index, **described, **more, "divergences": divergences})

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
        return self._done[_run_key(0, index, contender)]

    def _keep(self, record: Record) -> None:
        self.journal.append(record)
        self._done[_key(record)] = record

    def _finished(self, repeat: int, question: Question) -> int:
        return sum(_run_key(repeat, question.index, contender) in self._done for contender in self.contenders)

    def _complete(self, repeat: int, question: Question) -> bool:
        # The prompt's own record is written after its runs.
        described = repeat > 0 or ("prompt", question.index) in self._done
        return described and self._finished(repeat, question) == len(self.contenders)


def _key(record: Record) -> tuple[Any, ...]:
    """What a record is about: there is one of each."""
    if record["kind"] == "run":
        return "run", record["repeat"], record["prompt"], record["method"]
    if record["kind"] == "prompt":
        return "prompt", record["index"]
    return record["kind"], record["draft"], record["repeat"]


def _run_key(repeat: int, index: int, contender: Contender) -> tuple[Any, ...]:
    return "run", repeat, index, contender.method.name


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
    lookahead: int,
) -> dict[str, Any] | None:
    """All runs of all processes as the dict that the JSON will hold; None in all processes but the main one.

    What an earlier start with the same arguments left unfinished is continued.

    Raises:
        BenchError: the output folder can't be used, or holds an unfinished run with other arguments.
    """
    results.check_writable(settings.output_dir)
    stem = results.stem(settings)
    kept = settings.to_dict()
    del kept["output_dir"]
    journal = Journal(settings.output_dir, stem, kept, shared.rank)
    shared.wait()
    now = environment.describe()
    journal.begin(environment=now)
    collection = Collection(settings, contenders, journal, shared)
    collection.run(dialogues)
    collection.sample_forwards(dialogues, lookahead)
    records = collection.gathered()
    journal.close()
    if not shared.main:
        return None
    methods = [contender.method for contender in contenders]
    result = results.new(settings, contenders[0].pair, methods, [])
    result |= results.from_records(records, result["methods"])
    result["processes"] = shared.count
    _take_environment(result, journal, now)
    cut = [prompt for prompt in result["prompts"] if prompt["cut"]]
    if cut:
        result["notes"].append(
            f"{len(cut)} of {len(result['prompts'])} prompts were longer than the context and cut on the left, "
            f"by {min(p['cut'] for p in cut)} to {max(p['cut'] for p in cut)} tokens."
        )
    return result


def finish(result: dict[str, Any], settings: Settings) -> None:
    """Saves the result and its rendering; the journal has then done its work."""
    results.save(result, settings)
    discard(settings.output_dir, results.stem(settings))


def _take_environment(result: dict[str, Any], journal: Journal, now: Record) -> None:
    """The environment is the one in which measuring began; a restart in another one is said."""
    assert journal.header is not None
    before = journal.header["environment"]
    for name in ("cpu", "gpus", "packages", "torch_threads", "commit"):
        if before[name] != now[name]:
            result["notes"].append(
                f"Measured in several sittings that differ in {name} ({before[name]}, then {now[name]}): "
                "times can't be compared safely."
            )
    result["environment"] = {**before, "load_average_at_end": environment.load_average()}
