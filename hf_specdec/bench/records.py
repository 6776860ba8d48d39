"""Typed records of what a run measures; each becomes a line of JSON. Computes nothing and needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hf_specdec.bench.settings import Settings
from hf_specdec.config import STRATEGIES

_DIGITS = 5  # significant digits of times: the rest is noise, and would fill most of the file


@dataclass(frozen=True)
class Method:
    """One way of decoding, as reports describe it.

    Args:
        name: unique within a run.
        title: shown to readers.
        kind: plain (generate() without a draft), none (our loop without a draft), assisted, ensemble, lookup
            (transformers' own), a strategy of ours (its ensemble has a `same_engine`), llama.cpp.
        engine: generate; how our rounds run: eager, recorded, static or compiled; or how llama.cpp stores the
            weights.
        lookahead: tokens drafted in a round where that is fixed, or "auto".
        same_engine: the name of plain decoding with the same compile mode and cache; None for transformers' own loops.
        draft, draft_parameters: name and size of the draft model.
        keywords: arguments of generate(), except models.
        role: in engines: plain, fixed, auto, stopped, block or floor; in replay: remembering (earlier answers) or none.
        cache, better_transformer: the switches of the task ablation.
    """

    name: str
    title: str
    kind: str
    engine: str = "generate"
    lookahead: int | str | None = None
    same_engine: str | None = None
    draft: str | None = None
    draft_parameters: int | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    role: str | None = None
    cache: bool | None = None
    better_transformer: bool | None = None

    @property
    def ours(self) -> bool:
        """Whether it is a strategy of this package, compared with plain decoding on the same engine."""
        return self.kind in STRATEGIES and self.same_engine is not None


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Sums over the rounds of a call. Lists are indexed by a number of tokens; for plain generate() all sums are 0.

    Args:
        first_tokens: tokens in the first delivery, over all rows.
        rounds: number of rounds.
        row_rounds: rounds of each row up to its end, summed over rows.
        drafted, accepted: tokens, over all rows and rounds.
        reached, kept: how many rounds reached each position of a draft, and in how many its token was accepted.
        overlap: the overlap of both distributions, summed over the positions reached; None if unknown.
        steps: after the first round, how many rounds had 0, 1, 2, … forward passes of the draft.
        widths: after the first round, how many passes of the target had 0, 1, 2, … tokens a row.
        draft_seconds, verify_seconds, round_seconds: totals of the rounds after the first; None if unknown.
    """

    first_tokens: int
    rounds: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    overlap: float | None = None
    steps: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    round_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Call(Rounds):
    """One timed call of generate(). Lists have one entry per row.

    Args:
        method: the method's name.
        prompts: index of each row's prompt.
        repeat: counted from 0.
        position: the call's place in the order in which all calls were made.
        seconds: duration of the whole call.
        first_seconds: from the call to the first delivery.
        new_tokens: new tokens of all rows, with EOS and without padding.
        outputs: a digest of each row's new tokens.
        texts: each row's new tokens as text, if the task reads texts.
        tokens: each row's new tokens; not kept in results.
        again: earlier calls that were discarded because passes were recorded or compiled in them.
        preparing: extra seconds that those calls took, compared with this one.
        peak_bytes: peak memory during the call, of the process or of the GPU.
        read_rate: bytes per second at which memory was read right after the call.
    """

    method: str
    prompts: tuple[int, ...]
    repeat: int
    position: int
    seconds: float
    first_seconds: float
    new_tokens: int
    outputs: tuple[str, ...]
    texts: tuple[str, ...] | None = None
    tokens: tuple[tuple[int, ...], ...] | None = None
    again: int = 0
    preparing: float = 0.0
    peak_bytes: int | None = None
    read_rate: float | None = None


@dataclass(frozen=True)
class Pass:
    """A timed bare pass on an engine, at the shapes of the calls on these prompts.

    Args:
        role: "target", where `tokens` is the width of the pass, or "draft", where it is the number of steps in a row.
        seconds: duration of the pass, or of one step.
    """

    engine: str
    draft: str | None
    prompts: tuple[int, ...]
    repeat: int
    length: int
    role: str
    tokens: int
    seconds: float


@dataclass(frozen=True)
class ColdStart:
    """The warm-up calls of a method, before its times had settled.

    Args:
        batch: number of rows.
        length: tokens of the longest prompt.
        seconds: duration of each warm-up call, in order.
        settled: whether the last two agreed and nothing was prepared in the last one.
        number: place in the order in which methods were warmed up.
    """

    method: str
    batch: int
    length: int
    seconds: tuple[float, ...]
    settled: bool
    number: int = 0


@dataclass(frozen=True)
class Divergence:
    """Where two outputs for the same prompt first differ, and how sure the model was there.

    Args:
        position: index of the first new token that differs.
        margin: the largest logit minus the second largest at that position, in nats.
        gap: |logit of one output's token − logit of the other's|; None where one output just ends earlier. A gap
            well above the margin means that one of the two tokens was no near-tie.
    """

    position: int
    margin: float | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Asked:
    """A prompt. The turns of a dialogue share one `question`; so do the lengths of an example.

    Args:
        tokens: length of the prompt, after `cut` tokens were removed.
        turn: counted from 1.
        divergences: by method, where its greedy output first differs from plain decoding's.
    """

    index: int
    question: int
    label: str
    tokens: int
    cut: int = 0
    turn: int = 1
    references: tuple[str, ...] = ()
    divergences: Mapping[str, Divergence] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """What a report says of a model.

    Args:
        synthetic: a sentence for the report, if the weights are random.
        sampling: the sampling settings of its generation_config, such as temperature 0.2.
        processors: settings of its generation_config that also affect greedy decoding, such as repetition_penalty 1.1.
    """

    name: str
    kind: str
    parameters: int
    dtype: str
    device: str
    attention: str
    synthetic: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    processors: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Environment:
    """Hardware and software of a run; nothing in it identifies the machine or its user."""

    date: str
    python: str
    system: str
    packages: Mapping[str, str | None]
    cpu: str
    instructions: str | None
    cores: int | None
    torch_threads: int
    gpus: tuple[str, ...]
    busy_cores: float | None
    commit: str | None
    dirty: bool | None
    busy_cores_at_end: float | None = None


@dataclass(frozen=True)
class Score:
    """Quality of a method's answers against the references, 0 to 100; `subtask` None means all subtasks."""

    method: str
    subtask: str | None
    examples: int
    bleu: float
    rouge1: float
    rouge2: float
    rougeL: float  # noqa: N815, the usual name of the measure
    exact_match: float
    facts: float | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes that a step of the target reads at batch size 1 with `context` tokens in its cache; None if unknown."""

    context: int
    weight_bytes: int | None
    cache_bytes: int | None


@dataclass(frozen=True)
class Training:
    """How a draft was trained: [step, loss] curves and their cost; `saved` is None if the draft was not kept.

    Args:
        agreement: [step, share] of held-out positions at which the most likely token is the target's.
        tokens_read: tokens trained on since the last start, without padding.
        layers, vocabulary: the target's layers that the draft was cut from, and how many tokens it proposes.
    """

    curve: tuple[tuple[int, float], ...]
    held_out_curve: tuple[tuple[int, float], ...]
    seconds: float
    resumed_at: int
    parameters: int
    steps: int
    learning_rate: float
    prompts: int = 0
    tokens: int = 0
    rows: int = 0
    answers: str = ""
    saved: str | None = None
    tokens_read: int = 0
    agreement: tuple[tuple[int, float], ...] = ()
    layers: tuple[int, ...] = ()
    vocabulary: int | None = None


@dataclass(frozen=True)
class Interval:
    """A figure with its 95% interval; the ends are None if there are too few examples for an interval."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def faster(self) -> bool:
        """Whether the interval of a ratio lies above 1."""
        return self.low is not None and self.low > 1

    @property
    def slower(self) -> bool:
        """Whether the interval of a ratio lies below 1."""
        return self.high is not None and self.high < 1


@dataclass(frozen=True)
class Tuned:
    """The outcome of the task tune at a batch size.

    Args:
        choice: a method's name; None for plain decoding.
        near: methods that are not surely slower.
        losses: for each lossy method, its difference in quality from plain decoding; None if unknown.
        ratios: speedups over plain decoding of the finalists, the fastest first.
    """

    batch: int
    seconds: float
    choice: str | None
    near: tuple[str, ...]
    losses: Mapping[str, Interval | None]
    notes: tuple[str, ...]
    ratios: Mapping[str, Interval]


@dataclass
class Result:
    """Everything that a run measured. Of the computed figures it holds scores only, since these take long."""

    settings: Settings
    command: tuple[str, ...]
    environment: Environment
    models: dict[str, Model]
    methods: list[Method]
    loading_seconds: dict[str, float] = field(default_factory=dict)
    lookahead: int | str | None = None
    split: str | None = None
    processes: int = 1
    encoder_decoder: bool = False
    prompts: list[Asked] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    replayed: list[Call] = field(default_factory=list)  # predicted calls, which were never made
    passes: list[Pass] = field(default_factory=list)
    cold: list[ColdStart] = field(default_factory=list)
    quality: list[Score] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    memory: Memory | None = None
    training: Training | None = None
    tuned: list[Tuned] = field(default_factory=list)

    @property
    def synthetic(self) -> bool:
        """Whether the weights are random and acceptance is imposed."""
        return self.models["target"].synthetic is not None

    def method(self, name: str) -> Method:
        """Return the method of this name."""
        return next(method for method in self.methods if method.name == name)


def as_json(value: Any) -> Any:
    """Convert a record, or lists and dictionaries of records, to JSON data; floats keep five significant digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: as_json(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


@cache
def _types_of(record: type) -> Mapping[str, Any]:
    """The types of a record's fields."""
    return get_type_hints(record)


def from_json(kind: Any, value: Any) -> Any:
    """Restore a record of type `kind` from the data of `as_json`; raise TypeError or AttributeError on other data."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _types_of(kind)
        return kind(**{name: from_json(hints.get(name, Any), item) for name, item in value.items()})
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = [one for one in inner if one is not type(None)]
        return value if value is None or len(kinds) > 1 else from_json(kinds[0], value)
    if origin is list or (origin is tuple and inner[-1] is Ellipsis):
        return origin(from_json(inner[0], item) for item in value)
    if origin in (dict, Mapping):
        return {key: from_json(inner[1], item) for key, item in value.items()}
    if origin is tuple:
        return tuple(value)
    return Path(value) if kind is Path else value
