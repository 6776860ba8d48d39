"""Which rejections of lossless speculation were needed, and what an oracle would bring that makes only those.

Along an answer of the target, lossless speculation rejects the draft's token at some positions. A rejection is harmless
if the score is no lower where the draft's token is kept and the target goes on greedily than where it goes on from its
own token. The task `sweep` measures this, one rejection at a time. Rounds are then counted on the target's answer:
lossless speculation rejects at every such position that it reaches, the oracle only at harmful ones. How the text would
go on after several kept tokens is left out, so the oracle is an estimate.

BiLD's other half, the fallback, ends a draft before a token that is likely to be rejected. A perfect one ends it right
before each token that is: what the oracle brings with it bounds BiLD as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_specdec.bench.figures.bootstrap import Interval, Ratio, interval
from hf_specdec.bench.figures.passes import Costs, costs_of
from hf_specdec.bench.figures.speed import MethodDict, Result, batch_sizes, calls_of, fastest_of

# Of an answer: its length in tokens, and (position, whether harmless) of each rejection.
Answer = tuple[int, Sequence[tuple[int, bool]]]
# Of a round: its first position, and how many tokens it drafts and keeps.
Round = tuple[int, int, int]


@dataclass(frozen=True)
class Bounds:
    """What better acceptance could bring over the fastest lossless speculation with a draft.

    Args:
        lookahead: of that.
        answers: how many it was counted on.
        harmless: share of its rejections that are harmless; None without rejections.
        oracle: the speed of an oracle that rejects only what is not harmless; None without bare passes.
        perfect: with a perfect fallback too.
    """

    lookahead: int
    answers: int
    harmless: Interval | None
    oracle: Ratio | None
    perfect: Ratio | None


def rounds_of(length: int, lookahead: int, rejected: Iterable[int]) -> list[Round]:
    """The rounds of an answer if exactly these positions are rejected.

    A round keeps its drafts up to the first rejected position and adds the target's own token.
    """
    refused = set(rejected)
    at, rounds = 0, []
    while at < length:
        end = min(at + lookahead, length)
        stop = next((position for position in range(at, end) if position in refused), end)
        rounds.append((at, end - at, stop - at))
        at = stop + 1
    return rounds


def harmless_share(answers: Sequence[Answer], lookahead: int) -> Interval | None:
    """Share of the rejections of lossless speculation that are harmless; None without rejections."""
    cells = []
    for length, positions in answers:
        harmless = dict(positions)
        rounds = rounds_of(length, lookahead, harmless)
        reached = [at + kept for at, drafted, kept in rounds if kept < drafted]
        if reached:
            cells.append([(float(sum(harmless[position] for position in reached)), float(len(reached)))])
    return interval(cells, lambda harmless, all_: harmless / all_)


def oracle_gain(
    answers: Sequence[Answer], lookahead: int, longest: Iterable[int], passes: Costs, *, perfect_fallback: bool = False
) -> Ratio | None:
    """Time of lossless speculation / time of the oracle, both from bare passes; None without answers.

    Args:
        lookahead: of lossless speculation.
        longest: lookaheads of the oracle, of which the fastest counts.
        perfect_fallback: whether the oracle's drafts end right before each token that it rejects.
    """
    lossless = [_seconds(rounds_of(n, lookahead, dict(found)), passes) for n, found in answers]
    oracles = [
        [_seconds(rounds_of(n, most, _harmful(found)), passes, whole=not perfect_fallback) for n, found in answers]
        for most in longest
    ]
    best = min(oracles, key=sum)
    cells = [[(base, own)] for base, own in zip(lossless, best, strict=True)]
    found = interval(cells, lambda base, own: base / own)
    return None if found is None else Ratio(found.value, found.low, found.high)


def bounds(result: Result, draft: str, prompts: Iterable[int]) -> Bounds | None:
    """What better acceptance could bring with a draft on these prompts; None if its rejections were not measured."""
    rows, wanted = _fixed_lookaheads(result, draft), set(prompts)
    base, answers = fastest_of(result, rows), _answers(result, draft, wanted)
    if base is None or not answers:
        return None
    lookahead, longest = base["lookahead"], [row["lookahead"] for row in rows]
    share = harmless_share(answers, lookahead)
    batch = batch_sizes(result)[0]
    passes = costs_of(result, base, calls_of(result, base["name"], batch=batch, prompts=wanted), batch)
    if passes is None or not passes.draft:
        return Bounds(lookahead, len(answers), share, None, None)
    oracle = oracle_gain(answers, lookahead, longest, passes)
    perfect = oracle_gain(answers, lookahead, longest, passes, perfect_fallback=True)
    return Bounds(lookahead, len(answers), share, oracle, perfect)


def _fixed_lookaheads(result: Result, draft: str) -> list[MethodDict]:
    """Speculative decoding with a draft that ends by its length alone."""
    return [
        method
        for method in result["methods"]
        if (method["kind"], method["draft"]) == ("speculative", draft)
        and isinstance(method["lookahead"], int)
        and method["keywords"].get("drafter", "model") == "model"
        and "entropy_threshold" not in method["keywords"]
    ]


def _answers(result: Result, draft: str, prompts: Iterable[int]) -> list[Answer]:
    """The answers whose rejections with a draft were measured."""
    wanted = set(prompts)
    return [
        (found["length"], found["positions"])
        for prompt in result["prompts"]
        if prompt["index"] in wanted and (found := prompt.get("disagreements", {}).get(draft)) is not None
    ]


def _harmful(positions: Sequence[tuple[int, bool]]) -> list[int]:
    return [position for position, harmless in positions if not harmless]


def _seconds(rounds: Sequence[Round], passes: Costs, *, whole: bool = True) -> float:
    """Of bare passes, if drafts run to their `whole` length or end with the tokens that are kept."""
    lengths = [drafted if whole else kept for _, drafted, kept in rounds]
    return sum(passes.drafting(count) + passes.verification(count + 1) for count in lengths)
