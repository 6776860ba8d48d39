"""Results made by hand, whose figures a few lines of a test can compute."""

import random
from typing import Any

from hf_specdec.bench.figures.frames import Part, frame, whole
from hf_specdec.bench.records import Asked, Call, Environment, Method, Model, Result
from hf_specdec.bench.running.rounds import counted_round, summary
from hf_specdec.bench.running.timed_call import digest
from hf_specdec.bench.settings import Settings

PLACE = Environment("", "", "", {"torch": "2", "transformers": "5"}, "cpu", None, 1, 1, (), 0.0, None, None)


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
    return Call(
        method=method, prompts=(prompt,), repeat=repeat, position=0, seconds=seconds, first_seconds=prefill,
        new_tokens=tokens, first_tokens=1, outputs=(digest(range(tokens)),),
    )  # fmt: skip


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
    told = summary([counted_round([d], [a], [a + 1], d, d + 1) for d, a in rounds])
    times = {"draft_seconds": 0.1, "verify_seconds": 0.2, "round_seconds": 0.4}
    return Call(
        method=method, prompts=(prompt,), repeat=repeat, position=0, seconds=seconds, first_seconds=1.0,
        new_tokens=sum(new), outputs=(digest(range(sum(new))),), **vars(told) | times,
    )  # fmt: skip


def method(name: str, kind: str | None = None, **facts: Any) -> Method:
    """What a result holds of a method."""
    drafts = (kind or name) in ("speculative", "bild", "assisted")
    about = {"draft": "small", "draft_parameters": 10} if drafts else {}
    return Method(name, name, kind or name, **about | facts)


def result_of(calls: list[Call], methods: list[Method], questions: dict[int, int] | None = None, **more: Any) -> Result:
    """A result whose prompts are those of the calls, each its own question if not told otherwise, of 100 tokens."""
    indexes = sorted({index for call in calls for index in call.prompts})
    prompts = [Asked(index, (questions or {}).get(index, index), "qa", 100) for index in indexes]
    models = {"target": Model("big", "Llama", 100, "float32", "cpu", "sdpa")}
    settings = more.pop("settings", Settings())
    return Result(settings, (), PLACE, models, methods, **{"prompts": prompts, "calls": calls, **more})


def part_of(calls: list[Call], methods: list[Method] | None = None, **more: Any) -> Part:
    """All calls of such a result; without methods, one of each name."""
    names = dict.fromkeys(call.method for call in calls)
    return whole(result_of(calls, [method(name) for name in names] if methods is None else methods, **more))


def frame_of(calls: list[Call]) -> Any:
    """The frame of calls."""
    return frame(calls, result_of(calls, []).prompts)


# What a drafted call was made from, by its place among the calls.
Drafts = dict[int, list[tuple[int, int]]]


def random_calls(seed: int, *, prompts: int = 12, repeats: int = 3) -> tuple[list[Call], Drafts]:
    """Plain, plain on our loop and speculative decoding with times and rounds drawn at random.

    The machine is slow in some repeats, for all alike.
    """
    rng = random.Random(seed)
    calls, drafts = list[Call](), Drafts()
    for repeat in range(repeats):
        for prompt in range(prompts):
            drift, tokens = rng.uniform(1, 3), rng.randint(8, 30)
            calls.append(plain_call(prompt, repeat, step=0.1 * drift, tokens=tokens, prefill=drift))
            calls.append(
                plain_call(prompt, repeat, step=0.07 * drift, tokens=tokens, prefill=drift, method="none recorded")
            )
            drafted = [
                (count, rng.randint(0, count)) for count in (rng.randint(1, 4) for _ in range(rng.randint(3, 8)))
            ]
            drafts[len(calls)] = drafted
            calls.append(drafted_call(drafted, seconds=1.0 + 0.15 * drift * len(drafted), prompt=prompt, repeat=repeat))
    return calls, drafts


METHODS = [
    method("plain"),
    method("none recorded", "none", engine="recorded", same_engine="none recorded"),
    method("speculative", engine="recorded", lookahead=4, same_engine="none recorded"),
]


def random_result(seed: int) -> tuple[Result, Drafts]:
    """Of `random_calls`. Questions have two turns, which are prompts 2k and 2k + 1."""
    calls, drafts = random_calls(seed)
    return result_of(calls, METHODS, {index: index // 2 * 2 for index in range(12)}), drafts
