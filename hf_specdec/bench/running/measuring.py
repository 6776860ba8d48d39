"""Runs contenders in turn on batches of prompts; each record is on disk before the next is measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from tqdm import tqdm

from hf_specdec.bench import environment
from hf_specdec.bench.inputs.prompts import Prompt, question_prompt
from hf_specdec.bench.inputs.questions import Question, split_of
from hf_specdec.bench.inputs.recordings import model_inputs
from hf_specdec.bench.journal import Journal, Key
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.models.names import stem
from hf_specdec.bench.records import Asked, Divergence, Pass, Result
from hf_specdec.bench.running.bare_passes import BarePasses, keeping_engines, widths_for
from hf_specdec.bench.running.divergence import divergence
from hf_specdec.bench.running.methods import GENERATE, Contender, lookahead
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_call import with_texts
from hf_specdec.bench.running.turns import turn, turn_number
from hf_specdec.bench.running.warming import warm_call, warm_up
from hf_specdec.bench.settings import Settings

Item = Prompt | Question
Batch = tuple[Item, ...]
# Batches for which a contender is warmed up once.
Group = Sequence[Batch]

_WITHOUT_DRAFT = ("plain", "none")  # kinds of methods


def measured(
    settings: Settings,
    contenders: Sequence[Contender],
    groups: Sequence[Group],
    *,
    shared: Processes = Processes(),  # noqa: B008
    read_rate: Callable[[], float] | None = None,
    passes_of: set[tuple[int, ...]] | None = None,
) -> Result | None:
    """Measure all calls and bare passes; return the result of all processes in the main one, None in the others.

    An unfinished run with the same arguments is continued.

    Args:
        contenders: plain generate() first; the others' outputs are compared with its outputs.
        groups: this process's share of the work.
        read_rate: measures memory bandwidth in bytes per second; called after each plain call of one row.
        passes_of: the indexes of the batches at which bare passes are timed; all by default.

    Raises:
        BenchError: the output folder holds a run of this name with other arguments, or the models refuse a call.
    """
    journal = Journal(settings, stem(settings), shared.count)
    shared.wait()  # no process writes before all have read
    work = _Work(settings, contenders, journal, shared, read_rate, passes_of)
    with keeping_engines(len(contenders), contenders[0].pair.target.device):
        work.run(groups)
    journal.close()
    records: dict[Key, object] = {}
    for key, record in shared.gather(list(journal.records.items())):
        records.setdefault(key, record)
    return conclude(new(settings, contenders, shared), journal, records) if shared.main else None


def measured_questions(
    settings: Settings, contenders: Sequence[Contender], dialogues: Sequence[Sequence[Question]], shared: Processes
) -> Result | None:
    """Like `measured`, on dialogues: all contenders answer the same prompts.

    The answers to a question's earlier turns are those of the first contender in the first repeat. Bare passes are
    timed once per subtask, at the batch of median length.
    """
    fitting = [one for one in contenders if one.takes(settings.batch_size)]
    listed = batches(dialogues, settings.batch_size)
    lengths: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
    for first, *_ in listed:
        prompt, _ = question_prompt(contenders[0].pair, first[0], (), settings.max_new_tokens)
        lengths.setdefault(prompt.label, []).append((len(prompt.token_ids), _indexes(first)))
    middling = {sorted(found)[len(found) // 2][1] for found in lengths.values()}
    mine: list[Batch] = [batch for dialogue in shared.share(listed) for batch in dialogue]
    result = measured(settings, fitting, [mine], shared=shared, passes_of=middling)
    if result is not None:
        result.split = split_of(settings)
        if cuts := [one.cut for one in result.prompts if one.cut]:
            result.notes.append(
                f"{len(cuts)} of {len(result.prompts)} prompts were longer than the context and cut on the left, "
                f"by {min(cuts)} to {max(cuts)} tokens."
            )
    return result


def batches(dialogues: Sequence[Sequence[Question]], size: int) -> list[list[tuple[Question, ...]]]:
    """Group up to `size` dialogues of one subtask and number of turns, turn by turn: `[group][turn][row]`."""
    same: dict[tuple[str, int], list[Sequence[Question]]] = {}
    for dialogue in dialogues:
        same.setdefault((dialogue[0].subtask, len(dialogue)), []).append(dialogue)
    groups = [some[start : start + size] for some in same.values() for start in range(0, len(some), size)]
    return [list(zip(*group, strict=True)) for group in sorted(groups, key=lambda group: group[0][0].index)]


def batches_of(prompts: Sequence[Prompt], settings: Settings, most: int) -> list[list[Batch]]:
    """Batches of prompts for each length and batch size; prompts with individual lengths keep their order.

    Prompts are repeated if there are fewer than a batch holds.

    Args:
        most: approximate number of rows at every batch size; at least one batch is made.
    """
    found: list[list[Batch]] = []
    by_length = [[one for one in prompts if len(one.token_ids) == length] for length in settings.prompt_lengths]
    for same in [list(prompts)] if settings.own_lengths else by_length:
        same *= -(-max(settings.batch_sizes) // len(same))
        for size in settings.batch_sizes:
            count = max(1, min(most, len(same)) // size)
            found.append([tuple(same[number * size : (number + 1) * size]) for number in range(count)])
    return found


def in_turn(
    contenders: Sequence[Contender], groups: Sequence[Group], repeats: int
) -> Iterator[tuple[int, int, Batch, list[Contender]]]:
    """Yield (group, repeat, batch, contenders); contenders take turns on each batch, each time in another order.

    So the machine's drift and leftovers in the processor's caches affect all alike, see `turn`. All repeats of a group
    come before the next group: only they are compared, and what was compiled for them need not be kept for long. Turns
    are counted across lengths, since figures pool the lengths.
    """
    begun: dict[int, int] = {}  # turns by batch size
    for group, same in enumerate(groups):
        size = len(same[0]) if same else 0
        here = [one for one in contenders if one.takes(size)]
        before = begun.get(size, 0)
        for repeat, (place, batch) in product(range(repeats), enumerate(same)):
            yield group, repeat, batch, turn(here, before + turn_number(repeat, place, len(same), len(here)))
        begun[size] = before + repeats * len(same)


def new(settings: Settings, contenders: Sequence[Contender], shared: Processes = Processes()) -> Result:  # noqa: B008
    """A result without calls."""
    pair = contenders[0].pair
    models = pair.describe()
    for one in contenders:  # the plain contender's pair may lack the draft
        models |= {role: model for role, model in one.pair.describe().items() if role not in models}
    return Result(
        settings,
        (Path(sys.argv[0]).name, *sys.argv[1:]),
        environment.describe(),
        models,
        [one.method for one in contenders],
        {name: seconds for one in contenders for name, seconds in one.pair.loading_seconds.items()},
        lookahead(settings, pair),
        processes=shared.count,
        encoder_decoder=pair.encoder_decoder,
        notes=[] if pair.synthetic is None else [f"{pair.synthetic}. Timings are real, texts are meaningless."],
    )


def conclude(result: Result, journal: Journal, records: dict[Key, object]) -> Result:
    """Add records to a result, in an order that doesn't depend on which process measured when.

    The environment is the one in which measuring began; a restart in another one is noted.
    """
    order = {method.name: number for number, method in enumerate(result.methods)}
    kinds: dict[str, list] = {kind: [] for kind in ("call", "asked", "cold", "passes")}
    for key, record in sorted(records.items(), key=lambda item: str(item[0])):
        kinds[key[0]].append((key, record) if key[0] == "passes" else record)
    result.calls = sorted(kinds["call"], key=lambda one: (one.repeat, len(one.prompts), one.prompts, order[one.method]))
    result.prompts = sorted(kinds["asked"], key=lambda one: one.index)
    result.cold = sorted(kinds["cold"], key=lambda one: one.number)
    result.passes = [Pass(*key[1:], *one) for key, listed in kinds["passes"] for one in listed]
    result.notes += journal.notes()
    result.environment = replace(journal.began()[0], busy_cores_at_end=environment.busy_cores())
    return result


class _Work:
    """One process's share of the measuring; calls that the journal holds are not repeated."""

    def __init__(
        self,
        settings: Settings,
        contenders: Sequence[Contender],
        journal: Journal,
        shared: Processes,
        read_rate: Callable[[], float] | None,
        passes_of: set[tuple[int, ...]] | None,
    ) -> None:
        self.settings, self.contenders, self.journal, self.shared = settings, contenders, journal, shared
        self.read_rate, self.passes_of = read_rate, passes_of
        self.baseline = contenders[0]
        pairs = {id(one.pair): one.pair for one in contenders if one.pair.draft is not None}
        self.bare = [
            BarePasses(pair, settings.max_new_tokens, widths_for([one for one in contenders if one.pair is pair]))
            for pair in pairs.values() or [self.baseline.pair]
        ]
        self.batch_of: dict[int, tuple[int, ...]] = {}

    def run(self, groups: Sequence[Group]) -> None:
        """Measure whatever is missing."""
        self.batch_of = {item.index: _indexes(batch) for group in groups for batch in group for item in batch}
        work = list(in_turn(self.contenders, groups, self.settings.repeats))
        done = sum(
            self.journal.has("call", one.name, _indexes(batch), repeat)
            for _, repeat, batch, order in work
            for one in order
        )
        bar = tqdm(
            total=sum(len(order) for *_, order in work), initial=done, desc=self.settings.task, unit="run",
            file=sys.stderr, disable=not self.shared.main,
        )  # fmt: skip
        warm: set[int] = set()
        position = 0
        with bar:
            for group, repeat, batch, order in work:
                if group not in warm:
                    warm.add(group)
                    self._warm_up(groups[group])
                if not self._complete(repeat, batch, order):
                    self._all_contenders(repeat, batch, order, position, bar)
                position += len(order)

    def _complete(self, repeat: int, batch: Batch, order: Sequence[Contender]) -> bool:
        described = repeat > 0 or all(self.journal.has("asked", item.index) for item in batch)
        called = all(self.journal.has("call", one.name, _indexes(batch), repeat) for one in order)
        return described and called and not self._untimed(repeat, batch, order)

    def _warm_up(self, group: Group) -> None:
        """Warm up in the order listed, so that the first method of an engine prepares what the others share."""
        places = list(product((_indexes(batch) for batch in group), range(self.settings.repeats)))
        prompts = [prompt for prompt, _ in self._prompts(group[0])]
        for one in self.contenders:
            if one.takes(len(prompts)) and not all(self.journal.has("call", one.name, *place) for place in places):
                number = sum(kind == "cold" for kind, *_ in self.journal.records)
                cold = warm_up(one, prompts, self.settings, number=number)
                if self.shared.main:
                    self.journal.keep("cold", cold)

    def _prompts(self, batch: Batch) -> list[tuple[Prompt, int]]:
        """The prompts, each with the number of tokens that were cut."""
        found = []
        for row, item in enumerate(batch):
            if isinstance(item, Prompt):
                found.append((item, 0))
                continue
            earlier = []
            for index in item.earlier:
                call = self.journal.call(self.baseline.name, self.batch_of[index], 0)
                assert call is not None and call.texts is not None
                earlier.append(call.texts[row])
            found.append(question_prompt(self.baseline.pair, item, earlier, self.settings.max_new_tokens))
        return found

    def _all_contenders(self, repeat: int, batch: Batch, order: Sequence[Contender], position: int, bar: tqdm) -> None:
        made = self._prompts(batch)
        prompts, indexes = [prompt for prompt, _ in made], _indexes(batch)
        for number, one in enumerate(order):
            if self.journal.has("call", one.name, indexes, repeat):
                continue
            call = warm_call(one, prompts, self.settings, repeat=repeat, position=position + number)
            if self.read_rate is not None and len(batch) == 1 and one.method.kind in _WITHOUT_DRAFT:
                call = replace(call, read_rate=self.read_rate())
            self.journal.keep("call", with_texts(call, one.pair) if isinstance(batch[0], Question) else call)
            bar.update()
        # After the last method of each batch, so that bare passes find the machine in the same state as calls do.
        for engine, passes in self._untimed(repeat, batch, order):
            length = max(len(prompt.token_ids) for prompt in prompts)
            about = {"engine": engine, "draft": passes.pair.draft_name, "prompts": indexes, "repeat": repeat}
            # Empty if the engine was not available and rounds ran without it.
            times = [(length, *one) for one in passes.sample(engine, prompts)]
            self.journal.keep("passes", about | {"times": times})
        if repeat == 0:
            for row, (item, (prompt, cut)) in enumerate(zip(batch, made, strict=True)):
                self.journal.keep("asked", self._asked(item, prompt, cut, self._divergences(batch, row, prompt, order)))

    def _untimed(self, repeat: int, batch: Batch, order: Sequence[Contender]) -> list[tuple[str, BarePasses]]:
        """The engines and pairs whose bare passes are still to be timed at this batch."""
        if self.passes_of is not None and _indexes(batch) not in self.passes_of:
            return []
        engines = sorted(dict.fromkeys(one.method.engine for one in order), key=lambda engine: engine != GENERATE)
        return [
            (engine, passes)
            for engine, passes in product(engines, self.bare)
            if any(one.method.engine == engine and self._runs_on(one, passes.pair) for one in order)
            and not self.journal.has("passes", engine, passes.pair.draft_name, _indexes(batch), repeat)
        ]

    def _runs_on(self, one: Contender, pair: LoadedPair) -> bool:
        return one.pair is pair or len(self.bare) == 1

    def _asked(self, item: Item, prompt: Prompt, cut: int, divergences: dict[str, Divergence]) -> Asked:
        tokens = len(prompt.token_ids)
        if isinstance(item, Prompt):
            question = item.index if item.question is None else item.question
            return Asked(item.index, question, item.label, tokens, divergences=divergences)
        first = item.earlier[0] if item.earlier else item.index
        return Asked(item.index, first, item.subtask, tokens, cut, len(item.turns), item.references, divergences)

    def _divergences(self, batch: Batch, row: int, prompt: Prompt, order: Sequence[Contender]) -> dict[str, Divergence]:
        """Where each contender's greedy output first differs from the baseline's, and by which margin of logits."""
        if self.settings.sampling or self.settings.endless:
            return {}
        tokens = {}
        for one in order:
            call = self.journal.call(one.name, _indexes(batch), 0)
            assert call is not None and call.tokens is not None
            tokens[one.name] = call.tokens[row]
        target, reference = self.baseline.pair.target, tokens[self.baseline.name]
        inputs = model_inputs(self.baseline.pair, [prompt], target)
        found = {name: divergence(target, inputs, some, reference) for name, some in sorted(tokens.items())}
        return {name: one for name, one in found.items() if one is not None}


def _indexes(batch: Batch) -> tuple[int, ...]:
    return tuple(item.index for item in batch)
