"""The decoding methods that are compared: their settings, how they are called, and how their rounds are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.round_records import Rounds, Spent, our_rounds
from hf_specdec.bench.settings import Settings
from hf_specdec.config import MAX_ASSISTANT_TOKENS, STRATEGY_SETTINGS

GENERATE = "generate"  # the engine of transformers' own loops

ReadRounds = Callable[[LoadedPair, list[list[int]], Sequence[int], Any], tuple[Rounds | None, Spent | None]]

# Settings of ours that are keywords of generate(), in the order in which they are written.
KEYWORDS = (
    "num_assistant_tokens", "fallback_threshold", "rollback_threshold", "lenience", "posterior_threshold",
    "assistant_ensemble_weight", "drafter", "verification", "entropy_threshold", "compile", "cache_implementation",
)  # fmt: skip

# How strategies are called in reports.
STRATEGY_TITLES = {
    "speculative": "speculative decoding",
    "bild": "BiLD",
    "lenient": "lenience",
    "typical": "typical acceptance",
    "ensemble": "ensemble",
}


@dataclass(frozen=True)
class Method:
    """One way of decoding.

    Args:
        name: unique in a run.
        title: for readers.
        kind: plain (generate() without a draft), none (our loop without a draft), assisted, ensemble, lookup
            (transformers' own), a strategy of ours (its ensemble has a `same_engine`), llama.cpp.
        engine: `GENERATE`; how our rounds run: eager, static, kernels or compiled; or how llama.cpp stores the weights.
        lookahead: tokens drafted in a round where that is fixed, or "auto".
        longest: the most tokens of a draft.
        keywords: of generate(), without its models; JSON-serialisable.
        models: further arguments of generate() that are models or tokenizers.
        draft: the model that drafts.
        draft_name: its name.
        same_engine: the name of plain decoding with the same compile mode and cache; None for transformers' own loops.
        most_rows: the largest batch that it takes; None: any.
        facts: of one task, for its reports.
        surroundings: `surroundings(pair)` is entered around the call, outside the clock.
        generate: what is called with generate()'s arguments; by default the target's own.
        read_rounds: `read_rounds(pair, tokens, puts, log)` with what `surroundings` yielded.
    """

    name: str
    title: str
    kind: str
    engine: str = GENERATE
    lookahead: int | str | None = None
    longest: int = 0
    keywords: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)
    draft: PreTrainedModel | None = None
    draft_name: str | None = None
    same_engine: str | None = None
    most_rows: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    surroundings: Callable[[LoadedPair], AbstractContextManager[Any]] = lambda pair: nullcontext()
    generate: Callable[[LoadedPair], Callable[..., Tensor]] = lambda pair: pair.target.generate
    read_rounds: ReadRounds = lambda pair, tokens, puts, log: (None, None)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of generate() that make it this method."""
        return {**self.models, **self.keywords}

    def takes(self, rows: int) -> bool:
        """Whether it takes batches of this many rows."""
        return self.most_rows is None or rows <= self.most_rows

    def describe(self) -> dict[str, Any]:
        """The method's entry in a result, JSON-serialisable."""
        names = ("name", "title", "kind", "engine", "lookahead", "same_engine")
        return {
            **{name: getattr(self, name) for name in names},
            "draft": self.draft_name,
            "draft_parameters": None if self.draft is None else self.draft.num_parameters(),
            "keywords": dict(self.keywords),
            **self.facts,
        }


def plain() -> Method:
    """generate() without a draft."""
    return Method("plain", "plain generate()", "plain")


def engine_of(keywords: Mapping[str, Any]) -> str:
    """The engine that these keywords of generate() choose; "kernels" where `compile=True` compiles no rounds."""
    if keywords.get("compile"):
        return "compiled" if keywords.get("drafter", "model") in ("model", "none") else "kernels"
    return "static" if keywords.get("cache_implementation") == "static" else "eager"


def plain_on_engine(keywords: Mapping[str, Any]) -> Method:
    """Our loop without a draft, on the engine that these keywords ask for."""
    kept = {name: keywords[name] for name in ("compile", "cache_implementation") if keywords.get(name)}
    return _of_our_loop(
        plain_on_engine_name(engine_of(kept)),
        f"plain on our loop, {engine_of(kept)}",
        "none",
        {"generation_strategy": "speculative", "drafter": "none", **kept},
    )


def plain_on_engine_name(engine: str) -> str:
    """What the method without a draft is called on an engine of ours."""
    return f"none {engine}"


def ours(
    strategy: str, keywords: Mapping[str, Any], pair: LoadedPair, *, name: str | None = None, title: str | None = None
) -> Method:
    """This package's decoding, called as a user would.

    Args:
        strategy: a key of `STRATEGY_TITLES`.
        keywords: of generate(), those of `KEYWORDS`; None or False leaves one out.
        name: by default the strategy's.
        title: by default what is special about the keywords.
    """
    kept = {key: keywords[key] for key in KEYWORDS if keywords.get(key) is not None and keywords[key] is not False}
    kept = {key: value for key, value in kept.items() if key not in others_settings(strategy)}
    drafts_by_model = kept.get("drafter", "model") in ("model", "hybrid")
    # They are compared; if they agree, nothing is translated.
    tokenizers = {"tokenizer": pair.tokenizer, "assistant_tokenizer": pair.draft_tokenizer} if drafts_by_model else {}
    return _of_our_loop(
        strategy if name is None else name,
        _title(strategy, kept) if title is None else title,
        strategy,
        {"generation_strategy": strategy, **kept},
        draft=pair.draft if drafts_by_model else None,
        draft_name=pair.draft_name if drafts_by_model else None,
        same_engine=plain_on_engine(kept).name,
        tokenizers=tokenizers,
    )


def others_settings(strategy: str) -> set[str]:
    """The keywords of generate() that belong to other strategies alone."""
    return {name for other, own in STRATEGY_SETTINGS.items() if other != strategy for name in own}


def chosen_keywords(settings: Settings, pair: LoadedPair) -> dict[str, Any]:
    """The keywords of generate() that `settings` ask for, the lookahead filled in."""
    keywords = {name: getattr(settings, name) for name in KEYWORDS}
    return keywords | {"num_assistant_tokens": lookahead(settings, pair)}


def lookahead(settings: Settings, pair: LoadedPair) -> int | str:
    """Draft tokens per round (γ): as given, otherwise the default of the drafter or of the target's family."""
    config = hf_specdec.SpeculationConfig(
        num_assistant_tokens=cast(Any, settings.num_assistant_tokens), drafter=settings.drafter or "model"
    )
    return cast("int | str", config.resolve(pair.target.config.model_type).num_assistant_tokens)


def fixed_lookahead(settings: Settings, pair: LoadedPair) -> int:
    """`lookahead`, or the family's default where it is "auto"."""
    found = lookahead(settings, pair)
    if isinstance(found, int):
        return found
    return cast(int, hf_specdec.SpeculationConfig().resolve(pair.target.config.model_type).num_assistant_tokens)


def _of_our_loop(
    name: str,
    title: str,
    kind: str,
    keywords: Mapping[str, Any],
    tokenizers: Mapping[str, Any] | None = None,
    **more: Any,
) -> Method:
    tokens = keywords.get("num_assistant_tokens")

    def read(pair: LoadedPair, new: Any, puts: Any, log: Any) -> tuple[Rounds | None, Spent | None]:
        stats = hf_specdec.last_speculation(pair.target)
        assert stats is not None, "a call of ours leaves statistics"
        return our_rounds(stats)

    return Method(
        name,
        title,
        kind,
        engine_of(keywords),
        tokens,
        MAX_ASSISTANT_TOKENS if tokens == "auto" else tokens or 0,
        keywords,
        {} if more.get("draft") is None else {"assistant_model": more["draft"], **(tokenizers or {})},
        surroundings=lambda loaded: hf_specdec.enable(loaded.target),
        read_rounds=read,
        **more,
    )


def _title(strategy: str, keywords: Mapping[str, Any]) -> str:
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
    if (engine := engine_of(keywords)) != "eager":
        parts.append(engine)
    return ", ".join(parts)
