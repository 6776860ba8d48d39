"""Results made by hand, whose figures a few lines of a test can compute."""

from __future__ import annotations

import random
from typing import Any

from hf_specdec.bench.running.round_records import Rounds, Spent
from hf_specdec.bench.running.timed_call import Call


def plain_call(
    prompt: int = 0,
    repeat: int = 0,
    *,
    step: float = 0.1,
    tokens: int = 11,
    prefill: float = 1.0,
    method: str = "plain",
) -> Call:
    """A prompt's pass of `prefill` seconds brings the first token, each further one takes `step`."""
    seconds = prefill + step * (tokens - 1)
    return Call(method, (prompt,), repeat, 0, seconds, prefill, [list(range(tokens))])


def drafted_call(
    rounds: list[tuple[int, int]],
    *,
    seconds: float = 3.0,
    prompt: int = 0,
    repeat: int = 0,
    method: str = "speculative",
) -> Call:
    """Rounds are (drafted, accepted); the first delivery comes after 1 s; the overlap is that of greedy decoding."""
    new = [accepted + 1 for _, accepted in rounds]
    return Call(
        method,
        (prompt,),
        repeat,
        0,
        seconds,
        1.0,
        [list(range(sum(new)))],
        Rounds(
            drafted=[[drafted] for drafted, _ in rounds],
            accepted=[[accepted] for _, accepted in rounds],
            new_tokens=[[count] for count in new],
            overlap=[[float(accepted)] for _, accepted in rounds],
            draft_steps=[drafted for drafted, _ in rounds],
            width=[drafted + 1 for drafted, _ in rounds],
        ),
        Spent(0.1, 0.2, 0.4),
    )


def method(name: str, kind: str | None = None, **facts: Any) -> dict[str, Any]:
    """What a result holds of a method."""
    drafts = (kind or name) in ("speculative", "bild", "assisted")
    return {
        "name": name, "title": name, "kind": kind or name, "engine": "generate", "lookahead": None,
        "draft": "small" if drafts else None, "draft_parameters": 10 if drafts else None, "same_engine": None,
        "keywords": {}, **facts,
    }  # fmt: skip


def result_of(calls: list[Call], methods: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A result whose prompts are those of the calls, each a question of its own, of 100 tokens."""
    indexes = sorted({index for call in calls for index in call.prompts})
    prompts = [{"index": index, "question": index, "label": "qa", "tokens": 100} for index in indexes]
    return {
        "calls": calls, "methods": methods, "prompts": prompts, "passes": [], "cold": [], "loading_seconds": {},
        "environment": {"busy_cores": 0.0}, "sampling": False, "quality": [], "notes": [], **more,
    }  # fmt: skip


def random_result(seed: int, *, prompts: int = 6, repeats: int = 3) -> dict[str, Any]:
    """Plain, plain on our loop and speculative decoding with times and rounds drawn at random.

    Questions have two turns, which are prompts 2k and 2k + 1. The machine is slow in some repeats, for all alike.
    """
    rng = random.Random(seed)
    calls = []
    for repeat in range(repeats):
        for prompt in range(prompts):
            drift, tokens = rng.uniform(1, 3), rng.randint(8, 30)
            calls.append(plain_call(prompt, repeat, step=0.1 * drift, tokens=tokens, prefill=drift))
            calls.append(
                plain_call(prompt, repeat, step=0.07 * drift, tokens=tokens, prefill=drift, method="none eager")
            )
            drafted = [(rng.randint(1, 4), 0) for _ in range(rng.randint(3, 8))]
            drafted = [(count, rng.randint(0, count)) for count, _ in drafted]
            calls.append(drafted_call(drafted, seconds=1.0 + 0.15 * drift * len(drafted), prompt=prompt, repeat=repeat))
    methods = [
        method("plain"),
        method("none eager", "none", engine="eager", same_engine="none eager"),
        method("speculative", engine="eager", lookahead=4, same_engine="none eager"),
    ]
    result = result_of(calls, methods)
    for prompt in result["prompts"]:
        prompt["question"] = prompt["index"] // 2 * 2
    return result
