"""The contestants of the task `engines`, as rows of data: transformers' settings against ours on each engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import hf_specdec
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.methods import Method, assisted_as, assisted_refusal, lookahead, plain
from hf_specdec.bench.settings import Settings

LOOKAHEADS = (2, 4, 6, 8)
LONGEST_AUTO = 16  # the most tokens that "auto" drafts in a round
# A draft that stops where it is not sure, as transformers' default does; chosen on the embedded split train.
STOP_LOOKAHEAD, STOP_ENTROPY = 12, 0.55

# How our loop can run, as arguments of generate().
ENGINES: Mapping[str, dict[str, Any]] = {
    "eager": {},
    "static": {"cache_implementation": "static"},
    "compiled": {"compile": True},
}

# transformers' own settings: (words, tokens to begin with, schedule, confidence threshold). The last one is its
# default, 20 tokens included.
ASSISTED = (
    *((f"constant {tokens}", tokens, "constant", 0.0) for tokens in LOOKAHEADS),
    ("heuristic from 5", 5, "heuristic", 0.0),
    ("confidence 0.4", 20, "constant", 0.4),
)


def contestants(settings: Settings, pair: LoadedPair) -> list[Method]:
    """Plain generate() first, then transformers' assisted generation at each setting, then ours on each engine.

    `facts` of each: its kind (plain, assisted, none, fixed, block, stopped, auto, floor), engine, lookahead (None: not
    fixed) and the most rows of a batch that it takes (None: any).
    """
    found = [replace(plain(), title="plain generate()", facts=_facts("plain"))]
    if pair.target.device.type != "cpu":
        # There transformers compiles by itself.
        own = Method("plain static", "plain generate(), static cache", ENGINES["static"], _facts("plain", "static"))
        found.append(own)
    if assisted_refusal(settings, pair) is None:
        found += [
            replace(assisted_as(settings, pair, *row), facts=_facts("assisted", lookahead=row[1], most_rows=1))
            for row in ASSISTED
        ]
    for engine in settings.engines:
        found += _ours(settings, pair, engine)
    # No draft can cost more: what is left to lose where drafting never pays.
    floor = _speculative("auto, the target as its own draft", pair.target, "eager", {"num_assistant_tokens": "auto"})
    found.append(replace(floor, facts=_facts("floor", "eager", most_rows=1)))
    return found


def for_growth(settings: Settings, pair: LoadedPair) -> list[Method]:
    """Of each engine the method with the default lookahead."""
    chosen = replace(settings, lookaheads=(lookahead(settings, pair),))
    found = [method for engine in settings.engines for method in _ours(chosen, pair, engine)]
    return [method for method in found if method.facts["kind"] == "fixed"]


def runs_at(method: Method, rows: int) -> bool:
    """Whether a method takes batches of so many rows."""
    most = method.facts["most_rows"]
    return most is None or rows <= most


def _ours(settings: Settings, pair: LoadedPair, engine: str) -> list[Method]:
    rows: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("plain on our loop", {"drafter": "none"}, _facts("none", engine)),
        *(
            (f"speculative, γ = {tokens}", {"num_assistant_tokens": tokens}, _facts("fixed", engine, tokens))
            for tokens in settings.lookaheads or LOOKAHEADS
        ),
        ("speculative, auto", {"num_assistant_tokens": "auto"}, _facts("auto", engine)),
    ]
    tokens = lookahead(settings, pair)
    words, judged = f"γ = {tokens}", {"num_assistant_tokens": tokens}
    stopping: dict[str, Any] = {"num_assistant_tokens": STOP_LOOKAHEAD, "entropy_threshold": STOP_ENTROPY}
    stop = f"entropy stop {STOP_ENTROPY:g}"
    rows.append((f"speculative, {stop}", stopping, _facts("stopped", engine)))
    if engine != "compiled":
        adapting = stopping | {"num_assistant_tokens": "auto"}
        rows.append((f"speculative, auto, {stop}", adapting, _facts("auto", engine)))
        words, judged = stop, stopping
    if settings.sampling:
        # Drafts judged together; in greedy decoding that is the same rule.
        rows.append((f"speculative, {words}, block", judged | {"verification": "block"}, _facts("block", engine)))
    return [
        replace(_speculative(title, pair.draft, engine, options), facts=facts)  #
        for title, options, facts in rows
    ]


def _speculative(title: str, draft: Any, engine: str, options: dict[str, Any]) -> Method:
    asked = {"assistant_model": draft, "generation_strategy": "speculative", **options, **ENGINES[engine]}
    return Method(
        f"{title}, {engine}",
        f"{title}, {engine}",
        asked,
        surroundings=lambda loaded: hf_specdec.enable(loaded.target),
    )


def _facts(
    kind: str, engine: str = "eager", lookahead: int | None = None, most_rows: int | None = None
) -> dict[str, Any]:
    return {"kind": kind, "engine": engine, "lookahead": lookahead, "most_rows": most_rows}
