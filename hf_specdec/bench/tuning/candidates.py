"""The candidates: first on the engine that needs no preparation, then the best of them on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Method
from hf_specdec.bench.running.methods import (
    ENGINES,
    STOP_ENTROPY,
    STOP_LOOKAHEAD,
    Contender,
    ours,
    plain_on_engine,
)
from hf_specdec.bench.settings import Settings

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12)
Keywords = Mapping[str, Any]

# The most promising first: where the time is short, the last ones are not tried.
_STOP: Keywords = {"entropy_threshold": STOP_ENTROPY}
_SPECULATIVE: tuple[Keywords, ...] = (
    {"num_assistant_tokens": 4},
    {"num_assistant_tokens": "auto", **_STOP},
    {"num_assistant_tokens": "auto"},
    {"num_assistant_tokens": STOP_LOOKAHEAD, **_STOP},
    *({"num_assistant_tokens": tokens} for tokens in (2, 6, 3, 8)),
    {"num_assistant_tokens": 4, "drafter": "hybrid"},
    {"num_assistant_tokens": "auto", "drafter": "hybrid"},
    *({"num_assistant_tokens": tokens} for tokens in (1, 12)),
)
_LOOKUP: tuple[Keywords, ...] = tuple({"num_assistant_tokens": n, "drafter": "lookup"} for n in (10, 4))
_BILD: tuple[Keywords, ...] = tuple(
    {"num_assistant_tokens": tokens, "fallback_threshold": fallback, "rollback_threshold": rollback}
    for fallback, rollback in ((0.6, 3.0), (0.3, 3.0), (0.6, 1.0), (0.3, 1.0))
    for tokens in (8, 4)
)


def unprepared_engine(settings: Settings, pair: LoadedPair) -> str:
    """The engine on which settings are compared first: eager, on a GPU static caches where they are asked for."""
    return "static" if pair.target.device.type == "cuda" and "static" in settings.engines else "eager"


def candidates(settings: Settings, pairs: Sequence[LoadedPair]) -> list[Contender]:
    """Every draft and setting on the engine that needs no preparation, the most promising first.

    BiLD is among them where `max_quality_loss` allows for it.
    """
    engine = unprepared_engine(settings, pairs[0])
    drafting = [pair for pair in pairs if pair.draft is not None]
    found = [plain_on_engine(ENGINES[engine], pairs[0])]
    for keywords in _SPECULATIVE:
        found += [_contender("speculative", keywords, pair, engine) for pair in drafting]
        if keywords is _SPECULATIVE[0]:
            found += [_contender("speculative", lookup, pairs[0], engine) for lookup in _LOOKUP]
    if settings.max_quality_loss is not None:
        bild = [_contender("bild", keywords, pair, engine) for keywords in _BILD for pair in drafting]
        # In the middle, so that a short time leaves out some of both.
        found[len(found) // 2 : len(found) // 2] = bild
    return found


def on_engine(engine: str, ranking: Sequence[Contender]) -> list[Contender]:
    """The best of another engine's ranking on this one, the most promising first.

    The fastest fixed lookahead; no draft; the fastest entropy stop; the lookahead's neighbours, since another engine
    may favour another length; the fastest of each other draft; the fastest of all, and of each strategy.
    """
    drafted = [one for one in ranking if one.method.kind != "none"]
    fixed = [one for one in drafted if _is_fixed(one.method)]
    stopping = [one for one in drafted if _stops_by_entropy(one.method)]
    found = [_again(one, engine) for one in (*fixed[:1], *stopping[:1])]
    for one in fixed[:1]:
        found += [_again(one, engine, count) for count in _neighbours(one.method.keywords["num_assistant_tokens"])]
    # First where drafts don't pay, otherwise after the fastest draft.
    place = 1 if drafted[:1] == list(ranking[:1]) else 0
    found[place:place] = [plain_on_engine(ENGINES[engine], one.pair) for one in ranking[:1]]
    drafts: dict[str | None, Contender] = {}
    kinds: dict[str, Contender] = {}
    for one in fixed:
        drafts.setdefault(one.method.draft, one)
    for one in drafted:
        kinds.setdefault(one.method.kind, one)
    found += [_again(one, engine) for one in (*drafted[:1], *drafts.values(), *kinds.values()) if _fits(one, engine)]
    return list({one.name: one for one in found}.values())


def _contender(strategy: str, keywords: Keywords, pair: LoadedPair, engine: str) -> Contender:
    one = ours(strategy, {**keywords, **ENGINES[engine]}, pair)
    method = one.method
    told = [f"{key}={value}" for key, value in method.keywords.items() if key != "generation_strategy"]
    name = "/".join([strategy, *([method.draft] if method.draft else []), *told])
    with_draft = f" with {method.draft}" if method.draft else ""
    fixed = f", lookahead {method.lookahead}" if isinstance(method.lookahead, int) else ""
    return one.told(name=name, title=f"{method.title}{with_draft}{fixed}")


def _again(one: Contender, engine: str, tokens: int | None = None) -> Contender:
    """A candidate on another engine, with another lookahead if one is given."""
    engines = {name for keywords in ENGINES.values() for name in keywords}
    kept = {name: value for name, value in one.method.keywords.items() if name not in engines}
    more = {} if tokens is None else {"num_assistant_tokens": tokens}
    return _contender(kept.pop("generation_strategy"), kept | more, one.pair, engine)


def _fits(one: Contender, engine: str) -> bool:
    """Whether an engine gains anything: compiled rounds draft with a model alone."""
    return engine != "compiled" or _by_model(one.method)


def _by_model(method: Method) -> bool:
    return method.draft is not None and "drafter" not in method.keywords


def _is_fixed(method: Method) -> bool:
    lossless = _by_model(method) and method.kind == "speculative"
    return lossless and isinstance(method.lookahead, int) and "entropy_threshold" not in method.keywords


def _stops_by_entropy(method: Method) -> bool:
    return _by_model(method) and "entropy_threshold" in method.keywords


def _neighbours(tokens: int) -> list[int]:
    place = LOOKAHEADS.index(tokens)
    return [*LOOKAHEADS[place + 1 : place + 2], *LOOKAHEADS[max(0, place - 1) : place]]
