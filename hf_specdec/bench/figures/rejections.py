"""Which rejections of lossless speculation were needed, and what an oracle would bring that makes only those.

Along the target's greedy answer, the draft's most likely token differs from the target's at some positions. Such a
disagreement is harmless if the answer's score does not fall when the draft's token takes the target's place there and
the target goes on from it. The task `sweep` measures this, one disagreement at a time. Rounds are then counted on the
target's answer: lossless speculation rejects at every disagreement that it reaches, the oracle only at harmful ones.
How the text would go on after several accepted tokens is left out, so the oracle is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_specdec.bench.figures.bootstrap import Interval, Ratio, interval
from hf_specdec.bench.figures.speed import Result

# Of an answer: its length in tokens, and (position, whether harmless) of each disagreement.
Answer = tuple[int, Sequence[tuple[int, bool]]]


def measured(result: Result) -> list[tuple[str, int]]:
    """(draft, lookahead) of the speculative decoding whose disagreements were measured."""
    known = {draft for prompt in result["prompts"] for draft in prompt.get("disagreements", {})}
    rows = [m for m in result["methods"] if m["kind"] == "speculative" and m["draft"] in known]
    return list(dict.fromkeys((m["draft"], m["lookahead"]) for m in rows if isinstance(m["lookahead"], int)))


def answers_with_disagreements(result: Result, draft: str, prompts: Iterable[int]) -> list[Answer]:
    """The answers whose disagreements with a draft were measured."""
    wanted = set(prompts)
    return [
        (found["length"], found["positions"])
        for prompt in result["prompts"]
        if prompt["index"] in wanted and (found := prompt.get("disagreements", {}).get(draft)) is not None
    ]


def rounds_of(length: int, lookahead: int, rejected: Iterable[int]) -> tuple[int, list[int]]:
    """The number of rounds of an answer if exactly these positions are rejected, and which of them are reached.

    A round keeps its drafts up to the first rejected position and adds the target's own token.
    """
    refused = set(rejected)
    at, rounds, reached = 0, 0, []
    while at < length:
        end = min(at + lookahead, length)
        stop = next((position for position in range(at, end) if position in refused), end)
        if stop < end:
            reached.append(stop)
        at, rounds = stop + 1, rounds + 1
    return rounds, reached


def harmless_share(answers: Sequence[Answer], lookahead: int) -> Interval | None:
    """Share of the rejections of lossless speculation that are harmless; None without rejections."""
    cells = []
    for length, positions in answers:
        _, reached = rounds_of(length, lookahead, [position for position, _ in positions])
        if reached:
            harmless = dict(positions)
            cells.append([(float(sum(harmless[position] for position in reached)), float(len(reached)))])
    return interval(cells, lambda harmless, all_: harmless / all_)


def oracle_gain(answers: Sequence[Answer], lookahead: int) -> Ratio | None:
    """Rounds of lossless speculation / rounds of the oracle. Rounds of both cost the same, so this is its speedup."""
    cells = []
    for length, positions in answers:
        lossless, _ = rounds_of(length, lookahead, [position for position, _ in positions])
        oracle, _ = rounds_of(length, lookahead, [position for position, harmless in positions if not harmless])
        cells.append([(float(lossless), float(oracle))])
    found = interval(cells, lambda lossless, oracle: lossless / oracle)
    return None if found is None else Ratio(found.value, found.low, found.high)
