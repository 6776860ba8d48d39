"""What a run measures, as typed records, each of which becomes a line of JSON; computes nothing and needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hf_specdec.bench.settings import Settings
from hf_specdec.config import STRATEGIES

_DIGITS = 5  # significant digits of times: what lies below is noise, and takes most of a file


@dataclass(frozen=True)
class Method:
    """One way of decoding, as reports tell of it.

    Args:
        name: unique in a run.
        title: for readers.
        kind: plain (generate() without a draft), none (our loop without a draft), assisted, ensemble, lookup
            (transformers' own), a strategy of ours (its ensemble has a `same_engine`), llama.cpp.
        engine: generate; how our rounds run: eager, recorded, static or compiled; or how llama.cpp stores the
            weights.
        lookahead: tokens drafted in a round where that is fixed, or "auto".
        same_engine: the name of plain decoding with the same compile mode and cache; None for transformers' own loops.
        draft, draft_parameters: of the draft model.
        keywords: of generate(), without its models.
        role: in the task engines: plain, fixed, auto, stopped, block or floor.
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
        """Whether it is a strategy of ours, with plain decoding on the same engine beside it."""
        return self.kind in STRATEGIES and self.same_engine is not None


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds of a call, summed up. Lists have one entry for each number of tokens; of plain generate() all is 0.

    Args:
        first_tokens: of all rows, in the first delivery.
        rounds: how many.
        row_rounds: rounds of each row, without those after its end, summed.
        drafted, accepted: tokens, over all rows and rounds.
        reached, kept: how many rounds reached each position of a draft, and in how many its token was accepted.
        overlap: sum over the positions reached of the overlap of both distributions; None where it isn't told.
        steps: after the first round, how many rounds had 0, 1, 2, … forward passes of the draft.
        widths: after the first round, how many passes of the target had 0, 1, 2, … tokens a row.
        draft_seconds, verify_seconds, round_seconds: of the rounds after the first; None where the method doesn't tell.
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
    """One timed call of generate(). Lists have one entry a row.

    Args:
        method: its name.
        prompts: the rows' indexes.
        repeat: from 0.
        position: the call's place in the order in which all calls were made.
        seconds: of the whole call.
        first_seconds: from the call to the first delivery.
        new_tokens: of all rows, EOS included, padding not.
        outputs: a digest of each row's new tokens.
        texts: the rows' tokens as text, where a task reads them.
        tokens: the rows' new tokens; not kept in results.
        again: calls before this one that were thrown away, since passes were recorded or compiled in them.
        preparing: seconds that those calls took beyond as many like this one.
        peak_bytes: the most memory in use during the call, of the process or of the GPU.
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
        role: "target", whose `tokens` are those of the pass, or "draft", whose `tokens` are the steps in a row.
        seconds: of the pass, or of one of the steps.
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
    """The calls before a method's times had settled.

    Args:
        batch: rows.
        length: tokens of the longest prompt.
        seconds: of each warm-up call, in order.
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
        margin: the model's largest logit minus its second one there, after all that the outputs share; in nats.
        gap: |logit of one output's token − logit of the other's|; None where one output just ends earlier. A gap
            well above the margin means that one of the two tokens was no near-tie.
    """

    position: int
    margin: float | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Asked:
    """A prompt. Turns of a dialogue are prompts of one `question`, and so is an example at several lengths.

    Args:
        tokens: of the prompt, of which `cut` more were left out.
        turn: from 1.
        divergences: by method, where its greedy output leaves plain decoding's.
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
        synthetic: the sentence that a report has to carry where weights are random.
        sampling: what its generation_config says of sampling, as temperature 0.2.
        processors: what its generation_config changes in greedy decoding, too, as repetition_penalty 1.1.
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
    """Where a run happened; nothing in it names the machine or its user."""

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
    """Quality of a method's answers against the references, 0 to 100; `subtask` None is all."""

    method: str
    subtask: str | None
    examples: int
    bleu: float
    rouge1: float
    rouge2: float
    rougeL: float  # noqa: N815, the name that it has everywhere
    exact_match: float
    facts: float | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes that a step of the target reads at batch size 1 and a `context` of so many tokens; None if unknown."""

    context: int
    weight_bytes: int | None
    cache_bytes: int | None


@dataclass(frozen=True)
class Training:
    """How a draft was trained: [step, loss] curves, and what they cost; `saved` is None if it was not worth it.

    Args:
        agreement: [step, share] of held-out positions at which the most likely token is the target's.
        tokens_read: in the steps since the last start, padding left out.
        layers, vocabulary: the target's layers that the draft was cut of, and how many tokens it proposes.
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
    """A figure with its 95% interval; the ends are None where there are too few examples for one."""

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
        losses: of lossy methods, their difference in quality to plain decoding; None if unknown.
        ratios: speeds over plain decoding's of those from which the choice was made, the fastest first.
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
    """All that a run has measured, and nothing that can be computed from it, but scores, which take long."""

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
    replayed: list[Call] = field(default_factory=list)  # not made: what they would have been
    passes: list[Pass] = field(default_factory=list)
    cold: list[ColdStart] = field(default_factory=list)
    quality: list[Score] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    memory: Memory | None = None
    training: Training | None = None
    tuned: list[Tuned] = field(default_factory=list)

    @property
    def synthetic(self) -> bool:
        """Whether acceptance is imposed by random weights."""
        return self.models["target"].synthetic is not None

    def method(self, name: str) -> Method:
        """The method of this name."""
        return next(method for method in self.methods if method.name == name)


def as_json(value: Any) -> Any:
    """Data for JSON of a record, or of lists and dictionaries of them; floats have five significant digits."""
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
    """A record of this type from what `as_json` made of it; raises TypeError or AttributeError where it is another."""
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
