"""The methods that each task compares: plain generate(), plain on our engine, transformers' own, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.llama_cpp_methods import LLAMA_CPP_ENGINES, llama_cpp_methods, llama_cpp_refusal
from hf_specdec.bench.running.methods import (
    GENERATE,
    Method,
    chosen_keywords,
    fixed_lookahead,
    ours,
    plain,
    plain_on_engine,
)
from hf_specdec.bench.running.transformers_methods import (
    SCHEDULES,
    assisted,
    assisted_baselines,
    assisted_refusal,
    can_ensemble,
    ensemble,
    prompt_lookup,
)
from hf_specdec.bench.settings import Settings

LOOKAHEADS = (2, 4, 6, 8)
# A draft that stops where it is not sure, as transformers' default does; chosen on the embedded split train.
STOP_LOOKAHEAD, STOP_ENTROPY = 12, 0.55

# How our loop can run, as keywords of generate().
ENGINES: Mapping[str, dict[str, Any]] = {
    "eager": {},
    "static": {"cache_implementation": "static"},
    "compiled": {"compile": True},
}


def of_benchmark(settings: Settings, pair: LoadedPair) -> list[Method]:
    """The chosen strategy behind its baselines; without assistance plain generate() alone."""
    if not settings.assisted_generation:
        return [plain()]
    keywords = chosen_keywords(settings, pair)
    strategy = ours(settings.generation_strategy, keywords, pair)
    return _fitting(settings, [*_baselines(settings, pair, keywords), strategy])


def with_trimmed_draft(settings: Settings, trimmed: LoadedPair) -> Method:
    """The chosen strategy with a draft whose head is trimmed."""
    method = ours(settings.generation_strategy, chosen_keywords(settings, trimmed), trimmed, name="trimmed head")
    return replace(method, title=f"{method.title} with {trimmed.draft_name}")


def of_subtasks(settings: Settings, pair: LoadedPair) -> list[Method]:
    """Speculative decoding and BiLD behind their baselines, and transformers' prompt lookup."""
    keywords = chosen_keywords(settings, pair)
    strategies = [ours(strategy, keywords, pair) for strategy in ("speculative", "bild")]
    return _fitting(settings, [*_baselines(settings, pair, keywords), prompt_lookup(settings), *strategies])


def of_engines(settings: Settings, pair: LoadedPair) -> list[Method]:
    """Plain generate(), transformers' own at each setting, then ours on each engine, and llama.cpp.

    `role` of ours: fixed, auto, stopped, block, or floor, for which drafting can't pay. A synthetic pair leaves out
    what depends on texts or on the draft's confidence, which mean nothing there.
    """
    found = [plain()]
    if pair.target.device.type != "cpu":
        # There transformers compiles without being asked, anew for each batch size, which takes half a minute.
        static = "plain generate(), static cache"
        found.append(Method("plain static", static, "plain", keywords=ENGINES["static"], most_rows=1))
    if assisted_refusal(settings, pair) is None:
        schedules = [schedule for schedule in SCHEDULES if pair.synthetic is None or not schedule.confidence]
        found += [assisted(settings, pair, schedule) for schedule in schedules]
        if pair.synthetic is None:
            found += [ensemble(settings, pair)] if can_ensemble(pair) else []
            found.append(prompt_lookup(settings))
    for engine in settings.engines:
        if engine not in LLAMA_CPP_ENGINES:
            found += _on_engine(settings, pair, engine)
        elif llama_cpp_refusal(settings, pair) is None:
            lengths = [tokens for tokens in settings.grid.get("num_assistant_tokens") or () if tokens != "auto"]
            found += llama_cpp_methods(pair, engine, lengths or LOOKAHEADS)
    if pair.synthetic is not None:
        return [method for method in found if method.facts.get("role") not in ("stopped", "block")]
    # No draft can cost more: what is left to lose where drafting never pays.
    own = replace(pair, draft=pair.target, draft_name=pair.target_name)
    floor = ours("speculative", {"num_assistant_tokens": "auto"}, own, name="floor")
    title = "speculative, auto, the target as its own draft, eager"
    return [*found, replace(floor, title=title, most_rows=1, facts={"role": "floor"})]


def _baselines(settings: Settings, pair: LoadedPair, keywords: Mapping[str, Any]) -> list[Method]:
    found = [plain(), plain_on_engine(keywords)]
    if pair.draft is not None and assisted_refusal(settings, pair) is None:
        found += assisted_baselines(settings, pair)
    return found


def _fitting(settings: Settings, methods: list[Method]) -> list[Method]:
    return [method for method in methods if method.takes(settings.batch_size)]


def _on_engine(settings: Settings, pair: LoadedPair, engine: str) -> list[Method]:
    rows: list[tuple[str, str, dict[str, Any]]] = [
        *(
            ("fixed", f"speculative, γ = {tokens}", {"num_assistant_tokens": tokens})
            for tokens in settings.grid.get("num_assistant_tokens") or LOOKAHEADS
            if tokens != "auto"  # has a row of its own
        ),
        ("auto", "speculative, auto", {"num_assistant_tokens": "auto"}),
    ]
    tokens = fixed_lookahead(settings, pair)
    words, judged = f"γ = {tokens}", {"num_assistant_tokens": tokens}
    stopping: dict[str, Any] = {"num_assistant_tokens": STOP_LOOKAHEAD, "entropy_threshold": STOP_ENTROPY}
    stop = f"entropy stop {STOP_ENTROPY:g}"
    rows.append(("stopped", f"speculative, {stop}", stopping))
    if engine != "compiled":
        rows.append(("stopped", f"speculative, auto, {stop}", stopping | {"num_assistant_tokens": "auto"}))
        words, judged = stop, stopping
    if settings.sampling:
        # Drafts judged together; in greedy decoding that is the same rule.
        rows.append(("block", f"speculative, {words}, block", judged | {"verification": "block"}))
    found = [plain_on_engine(ENGINES[engine])]
    for role, title, keywords in rows:
        method = ours(
            "speculative", keywords | ENGINES[engine], pair, name=f"{title}, {engine}", title=f"{title}, {engine}"
        )
        found.append(replace(method, facts={"role": role}))
    return found


def engines_of(methods: list[Method]) -> list[str]:
    """The engines on which methods run, transformers' own loops first."""
    return sorted(dict.fromkeys(method.engine for method in methods), key=lambda engine: engine != GENERATE)
