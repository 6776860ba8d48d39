"""The contenders: this package's methods with their models, how to call them and how to read their rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor

import hf_specdec
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.models.names import short_name
from hf_specdec.bench.records import Method, Rounds
from hf_specdec.bench.running.rounds import summary
from hf_specdec.bench.settings import KEYWORDS, Settings
from hf_specdec.config import MAX_ASSISTANT_TOKENS, STRATEGY_SETTINGS, WITH_MODEL
from hf_specdec.models.recorded_passes import without_recordings

GENERATE = "generate"  # the engine of transformers' own loops

ReadRounds = Callable[[LoadedPair, list[list[int]], Sequence[int], Any], Rounds | None]

# How our loop can run, as keywords of generate(), plus `recordings`, which is handled here: see `without_recordings`.
ENGINES: Mapping[str, dict[str, Any]] = {
    "eager": {"recordings": False},
    "recorded": {},
    "static": {"cache_implementation": "static"},
    "compiled": {"compile": True},
}
# Ends drafts where the draft is unsure, as transformers' default does; chosen on the embedded split train.
STOP_LOOKAHEAD, STOP_ENTROPY = 12, 0.55

# Names of strategies in reports.
STRATEGY_TITLES = {
    "speculative": "speculative decoding",
    "bild": "BiLD",
    "lenient": "lenience",
    "typical": "typical acceptance",
    "ensemble": "ensemble",
}


@dataclass(frozen=True)
class Contender:
    """A method, the models that it runs on, and how it is called.

    Args:
        longest: the longest possible draft, in tokens.
        models: arguments of generate() that are models or tokenizers.
        most_rows: the largest batch that it accepts; None for any.
        surroundings: context manager around the call, outside the timed part.
        generate: called with generate()'s arguments; by default the target's own generate().
        read_rounds: `read_rounds(pair, tokens, puts, log)`, where `log` is what `surroundings` yielded.
    """

    method: Method
    pair: LoadedPair
    longest: int = 0
    models: Mapping[str, Any] = field(default_factory=dict)
    most_rows: int | None = None
    surroundings: Callable[[LoadedPair], AbstractContextManager[Any]] = lambda pair: nullcontext()
    generate: Callable[..., Tensor] | None = None
    read_rounds: ReadRounds = lambda pair, tokens, puts, log: None

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of generate() that select this method."""
        return {**self.models, **self.method.keywords}

    def takes(self, rows: int) -> bool:
        """Whether it accepts batches of this many rows."""
        return self.most_rows is None or rows <= self.most_rows

    def told(self, **facts: Any) -> Contender:
        """A copy with some fields of its `Method` replaced."""
        return replace(self, method=replace(self.method, **facts))


def plain(pair: LoadedPair) -> Contender:
    """Plain generate(), without a draft."""
    return Contender(Method("plain", "plain generate()", "plain"), pair)


def engine_of(keywords: Mapping[str, Any], pair: LoadedPair) -> str:
    """The engine that these keywords select."""
    if keywords.get("compile"):
        return "compiled"
    if keywords.get("cache_implementation") == "static":
        return "static"
    # Passes are recorded on a CPU only; a model without weights is treated as one on a CPU.
    on_cpu = pair.target.device.type in ("cpu", "meta")
    return "recorded" if keywords.get("recordings", True) and on_cpu else "eager"


def plain_on_engine(keywords: Mapping[str, Any], pair: LoadedPair) -> Contender:
    """Our loop without a draft, on the engine that these keywords select."""
    kept = {name: keywords[name] for name in ("compile", "cache_implementation") if keywords.get(name)}
    engine = engine_of(kept | {"recordings": keywords.get("recordings", True)}, pair)
    method = Method(
        f"none {engine}",
        f"plain on our loop, {engine}",
        "none",
        engine,
        keywords={"generation_strategy": "speculative", "drafter": "none", **kept},
    )
    return _of_our_loop(method, pair)


def ours(
    strategy: str, keywords: Mapping[str, Any], pair: LoadedPair, *, name: str | None = None, title: str | None = None
) -> Contender:
    """This package's decoding, called as a user would.

    Args:
        strategy: a key of `STRATEGY_TITLES`.
        keywords: arguments of generate() among `KEYWORDS`; those that are None or False are left out.
        name: by default the strategy's name.
        title: by default the strategy and its settings that differ from the defaults.
    """
    kept = {key: keywords[key] for key in KEYWORDS if keywords.get(key) is not None and keywords[key] is not False}
    kept = {key: value for key, value in kept.items() if key not in others_settings(strategy)}
    draft = pair.draft if kept.get("drafter", "model") in ("auto", *WITH_MODEL) else None
    engine = engine_of(keywords, pair)
    method = Method(
        strategy if name is None else name,
        _title(strategy, kept, engine) if title is None else title,
        strategy,
        engine,
        kept.get("num_assistant_tokens"),
        plain_on_engine(keywords, pair).name,
        None if draft is None else pair.draft_name,
        None if draft is None else draft.num_parameters(),
        {"generation_strategy": strategy, **kept},
    )
    if draft is None:
        return _of_our_loop(method, pair)
    # Tokenizers are always passed; if they agree, nothing is translated.
    tokenizers = {"tokenizer": pair.tokenizer, "assistant_tokenizer": pair.draft_tokenizer}
    return _of_our_loop(method, pair, {"assistant_model": draft, **tokenizers})


def named(strategy: str, keywords: Mapping[str, Any], pair: LoadedPair) -> Contender:
    """Like `ours`, with all settings in the name, and draft and lookahead in the title, for tasks that compare many."""
    one = ours(strategy, keywords, pair)
    method = one.method
    told = [f"{key}={value}" for key, value in method.keywords.items() if key != "generation_strategy"]
    name = "/".join([strategy, *([method.draft] if method.draft else []), *told])
    with_draft = f" with {short_name(method.draft)}" if method.draft else ""
    fixed = f", lookahead {method.lookahead}" if isinstance(method.lookahead, int) else ""
    return one.told(name=name, title=f"{method.title}{with_draft}{fixed}")


def others_settings(strategy: str) -> set[str]:
    """The keywords of generate() that belong to other strategies alone."""
    return {name for other, own in STRATEGY_SETTINGS.items() if other != strategy for name in own}


def chosen_keywords(settings: Settings, pair: LoadedPair) -> dict[str, Any]:
    """The keywords of generate() that `settings` select, with the lookahead filled in."""
    keywords = {name: getattr(settings, name) for name in KEYWORDS}
    return keywords | {"num_assistant_tokens": lookahead(settings, pair)}


def lookahead(settings: Settings, pair: LoadedPair) -> int | str:
    """Draft tokens per round (γ): the given number, or the default of the drafter or of the target's family."""
    config = hf_specdec.SpeculationConfig(
        num_assistant_tokens=cast(Any, settings.num_assistant_tokens), drafter=settings.drafter or "model"
    )
    return cast("int | str", config.resolve(pair.target.config.model_type).num_assistant_tokens)


def fixed_lookahead(settings: Settings, pair: LoadedPair) -> int:
    """`lookahead`, or the family's default if it is "auto"."""
    found = lookahead(settings, pair)
    if isinstance(found, int):
        return found
    return cast(int, hf_specdec.SpeculationConfig().resolve(pair.target.config.model_type).num_assistant_tokens)


def _of_our_loop(method: Method, pair: LoadedPair, models: Mapping[str, Any] | None = None) -> Contender:
    def read(loaded: LoadedPair, new: Any, puts: Any, log: Any) -> Rounds:
        stats = hf_specdec.last_speculation(loaded.target)
        assert stats is not None, "a call of ours leaves statistics"
        return summary(stats.rounds, times=True)

    @contextmanager
    def surroundings(loaded: LoadedPair) -> Iterator[None]:
        eagerly = without_recordings() if method.engine == "eager" else nullcontext()
        with eagerly, hf_specdec.enable(loaded.target):
            yield

    tokens = method.lookahead
    return Contender(
        method,
        pair,
        tokens if isinstance(tokens, int) else MAX_ASSISTANT_TOKENS if tokens == "auto" else 0,
        models or {},
        surroundings=surroundings,
        read_rounds=read,
    )


def _title(strategy: str, keywords: Mapping[str, Any], engine: str) -> str:
    """The strategy, and its settings that differ from the defaults."""
    values = " ".join(f"{keywords[name]:g}" for name in STRATEGY_SETTINGS[strategy] if name in keywords)
    parts = [f"{STRATEGY_TITLES[strategy]} {values}".rstrip()]
    if strategy == "bild":
        thresholds = ((word, keywords.get(f"{word}_threshold")) for word in ("fallback", "rollback"))
        parts = ["BiLD (" + ", ".join(f"{word} {value:g}" for word, value in thresholds if value is not None) + ")"]
    if keywords.get("num_assistant_tokens") == "auto":
        parts.append("auto")
    if keywords.get("drafter", "model") != "model":
        parts.append(f"drafter {keywords['drafter']}")
    if keywords.get("verification", "token") != "token":
        parts.append(str(keywords["verification"]))
    if "entropy_threshold" in keywords:
        parts.append(f"entropy stop {keywords['entropy_threshold']:g}")
    if engine != "recorded":
        parts.append(engine)
    return ", ".join(parts)
