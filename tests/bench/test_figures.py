"""Rates, ratios, intervals and acceptance, against numbers worked out here from their definitions."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import pytest
from helpers.made_up_results import drafted_call, method, plain_call, random_result, result_of

from hf_specdec.bench.figures import bootstrap, rounds, speed
from hf_specdec.bench.running.round_records import Rounds
from hf_specdec.bench.running.timed_call import Call

SEEDS = range(5)
METHODS = ("speculative", "plain")


def after_first(call: Call) -> tuple[int, float]:
    """Tokens and seconds after the first delivery."""
    first = sum(call.rounds.new_tokens[0]) if call.rounds else len(call.tokens)
    return sum(map(len, call.tokens)) - first, call.seconds - call.first_seconds


def named(result: dict[str, Any], name: str) -> list[Call]:
    return [call for call in result["calls"] if call.method == name]


@pytest.mark.parametrize("seed", SEEDS)
def test_rates_are_their_definitions(seed: int) -> None:
    result = random_result(seed)
    calls = named(result, "speculative")
    tokens, seconds = (sum(part) for part in zip(*map(after_first, calls), strict=True))
    assert speed.decode_rate(calls) == pytest.approx(tokens / seconds)
    everything = sum(len(call.tokens[0]) for call in calls)
    assert speed.end_to_end_rate(calls) == pytest.approx(everything / sum(call.seconds for call in calls))
    # Rates that counted all tokens, or all but one, would flatter speculation.
    assert everything / seconds > tokens / seconds < (everything - len(calls)) / seconds


def spec_bench(calls: list[Call], turns_of: dict[int, int]) -> float:
    """As evaluation/speed.py of Spec-Bench: the mean over questions of sum(new_tokens) / sum(wall_time)."""
    choices: dict[tuple[int, int], dict[str, list[float]]] = {}
    for call in calls:
        point = choices.setdefault((turns_of[call.prompts[0]], call.repeat), {"new_tokens": [], "wall_time": []})
        point["new_tokens"].append(len(call.tokens[0]))
        point["wall_time"].append(call.seconds)
    speeds = [sum(point["new_tokens"]) / sum(point["wall_time"]) for point in choices.values()]
    return float(np.array(speeds).mean())


@pytest.mark.parametrize("seed", SEEDS)
def test_macro_is_spec_bench_s(seed: int) -> None:
    result = random_result(seed)
    turns = {index: index // 2 for index in range(6)}
    rates = [spec_bench(named(result, name), turns) for name in METHODS]
    ratio = speed.speedup(result, "speculative", "plain", by="macro")
    assert ratio is not None and ratio.value == pytest.approx(rates[0] / rates[1])
    # Neither the mean over turns nor that of decode rates.
    apart = {index: index for index in turns}
    assert spec_bench(named(result, "speculative"), apart) != pytest.approx(rates[0], rel=1e-6)
    own = [[tokens / seconds for tokens, seconds in map(after_first, named(result, name))] for name in METHODS]
    assert mean(own[0]) / mean(own[1]) != pytest.approx(rates[0] / rates[1], rel=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_speedups_are_ratios_of_rates_on_the_same_examples(seed: int) -> None:
    result = random_result(seed)
    for name, base in (("speculative", "plain"), ("speculative", "none eager"), ("none eager", "plain")):
        sides = [list(map(after_first, named(result, one))) for one in (name, base)]
        rates = [sum(t for t, _ in side) / sum(s for _, s in side) for side in sides]
        found = speed.speedup(result, name, base)
        assert found is not None and found.value == pytest.approx(rates[0] / rates[1])
        assert found.low is not None and found.high is not None and found.low <= found.value <= found.high
    # A call that only one side has counts on neither.
    lacking = result | {"calls": [c for c in result["calls"] if (c.method, c.prompt, c.repeat) != ("plain", 0, 0)]}
    both = [c for c in named(result, "speculative") if (c.prompt, c.repeat) != (0, 0)]
    ours = sum(t for t, _ in map(after_first, both)) / sum(s for _, s in map(after_first, both))
    theirs = [after_first(call) for call in named(lacking, "plain")]
    expected = ours / (sum(t for t, _ in theirs) / sum(s for _, s in theirs))
    found = speed.speedup(lacking, "speculative", "plain")
    assert found is not None and found.value == pytest.approx(expected)


def test_a_call_without_decode_steps_has_no_rate() -> None:
    only_first = drafted_call([(4, 4)], seconds=1.0000001)
    assert speed.decode_part(only_first) is None and speed.decode_rate([only_first]) is None
    assert speed.rate_interval(result_of([only_first], [method("speculative")]), [only_first]) is None
    assert speed.decode_part(plain_call(tokens=1)) is None
    # It neither adds to the rates of others nor to a speedup, not even through its baseline.
    assert speed.decode_rate([only_first, plain_call()]) == pytest.approx(10.0)
    methods = [method("plain"), method("speculative")]
    calls = [only_first, plain_call(step=100.0)]
    assert speed.speedup(result_of(calls, methods), "speculative", "plain") is None
    calls += [drafted_call([(1, 1), (1, 1)], seconds=2.0, prompt=1), plain_call(1)]
    found = speed.speedup(result_of(calls, methods), "speculative", "plain")
    assert found is not None and found.value == pytest.approx(2.0 / 10.0)
    assert (found.low, found.faster, found.slower) == (None, False, False)


def test_a_batch_counts_the_tokens_of_all_its_rows() -> None:
    plain = Call("plain", (0, 1), 0, 0, 3.0, 1.0, [[1, 2, 3], [4]])
    assert speed.decode_part(plain) == (2.0, 2)
    drafted = Rounds([[2, 2], [2, 0]], [[2, 0], [1, 0]], [[3, 1], [2, 0]], [[2.0, 0.0], [1.0, 0.0]], [2, 2], [3, 3])
    ours = Call("speculative", (0, 1), 0, 0, 3.0, 1.0, [[1, 2, 3, 4, 5], [4]], drafted)
    assert speed.decode_part(ours) == (2.0, 2)
    assert rounds.waiting([ours]) == 1 / 4
    assert rounds.tokens_per_round([ours]) == 6 / 3, "the row that has ended takes part in one round"
    assert rounds.acceptance_rate([ours]) == 3 / 6


def test_the_typical_call_is_a_real_one() -> None:
    calls = [plain_call(repeat=repeat, step=step) for repeat, step in enumerate((0.3, 0.1, 0.2))]
    assert speed.typical_calls(calls) == [calls[2]]
    assert speed.typical_calls(calls[:2]) == [calls[1]], "the lower of two"
    assert speed.spread(calls) == pytest.approx((4.0 - 2.0) / 3.0)
    assert speed.spread(calls[:1]) is None


def two_level(cells: list[list[tuple[float, ...]]], figure: Any, draws: int, seed: int) -> tuple[float, float]:
    """The percentile bootstrap over examples, and of each over its repeats, in plain loops."""
    rng, values = random.Random(seed), []
    for _ in range(draws):
        chosen = [rng.choice(cells) for _ in cells]
        drawn = [rng.choice(cell) for cell in chosen for _ in cell]
        values.append(figure(*(sum(part) for part in zip(*drawn, strict=True))))
    values.sort()
    return values[round(0.025 * draws)], values[round(0.975 * draws) - 1]


def test_intervals_are_those_of_a_bootstrap_over_examples_and_repeats() -> None:
    rng = random.Random(1)
    cells = [
        [(rng.uniform(5, 9), rng.uniform(1, 2), 6.0, rng.uniform(2, 3)) for _ in range(count)]
        for count in (3, 3, 2, 3, 1, 3)
    ]

    def figure(a: float, b: float, c: float, d: float) -> float:
        return (a / b) / (c / d)

    found = bootstrap.interval(cells, figure)
    low, high = two_level(cells, figure, 4000, seed=2)
    assert found is not None and found.low is not None and found.high is not None
    width = high - low
    assert found.low == pytest.approx(low, abs=0.1 * width) and found.high == pytest.approx(high, abs=0.1 * width)
    assert found == bootstrap.interval(cells, figure), "the same cells, the same interval"
    # Over one example alone, its repeats are drawn; of a single cell nothing can be said.
    alone = bootstrap.interval([cells[0]], figure)
    assert alone is not None and alone.low is not None and alone.low < alone.value
    single = bootstrap.interval([cells[0][:1]], figure)
    assert single is not None and (single.low, single.high) == (None, None)
    assert bootstrap.interval([], figure) is None


def test_drift_that_hits_both_sides_is_paired_away() -> None:
    rng = random.Random(3)
    drifts = [[rng.uniform(1, 4) for _ in range(5)] for _ in range(6)]
    paired = [[(10.0, drift, 10.0, 1.1 * drift) for drift in row] for row in drifts]
    shuffled = [
        [(10.0, drift, 10.0, 1.1 * rng.uniform(1, 4)) for drift in row]  # the other side at another moment
        for row in drifts
    ]

    def ratio(a: Any, b: Any, c: Any, d: Any) -> Any:
        return (a / b) / (c / d)

    close, apart = bootstrap.interval(paired, ratio), bootstrap.interval(shuffled, ratio)
    assert close is not None and apart is not None
    assert (close.low, close.high) == pytest.approx((1.1, 1.1))
    assert apart.low is not None and apart.high is not None and apart.high - apart.low > 0.2


def test_faster_means_that_the_interval_excludes_1() -> None:
    assert bootstrap.Ratio(1.2, 1.01, 1.4).faster and not bootstrap.Ratio(1.2, 0.99, 1.4).faster
    assert bootstrap.Ratio(0.9, 0.8, 0.99).slower and not bootstrap.Ratio(0.9, 0.8, 1.01).slower
    assert not bootstrap.Ratio(2.0, None, None).faster


@pytest.mark.parametrize("seed", SEEDS)
def test_acceptance_counts(seed: int) -> None:
    calls = named(random_result(seed), "speculative")
    drafted = accepted = new = count = reached = 0
    overlap = 0.0
    by_position: dict[int, list[bool]] = {}
    for call in calls:
        assert call.rounds is not None
        for (d,), (a,), (n,), (o,) in zip(
            call.rounds.drafted, call.rounds.accepted, call.rounds.new_tokens, call.rounds.overlap or [], strict=True
        ):
            drafted, accepted, new, count = drafted + d, accepted + a, new + n, count + 1
            reached, overlap = reached + min(a + 1, d), overlap + o
            for place in range(min(a + 1, d)):
                by_position.setdefault(place, []).append(place < a)
    assert rounds.acceptance_rate(calls) == pytest.approx(accepted / drafted)
    assert rounds.tokens_per_round(calls) == pytest.approx(new / count)
    assert rounds.alpha(calls) == pytest.approx(overlap / reached)
    assert rounds.alpha(calls) != pytest.approx(accepted / drafted, rel=1e-3), "positions never reached don't count"
    for place, position in enumerate(rounds.acceptance_by_position(calls)):
        hits = by_position[place]
        assert (position.reached, position.accepted) == (len(hits), sum(hits))
        assert position.share == mean(hits) and position.low <= position.share <= position.high
    assert rounds.acceptance_rate([plain_call()]) is None and rounds.alpha([plain_call()]) is None
    assert rounds.tokens_per_round([plain_call()]) is None and rounds.acceptance_by_position([plain_call()]) == []


def test_alpha_is_unknown_where_a_method_does_not_tell() -> None:
    call = drafted_call([(4, 2)])
    assert call.rounds is not None
    assert rounds.alpha([replace(call, rounds=replace(call.rounds, overlap=None))]) is None


def test_the_time_of_a_round_is_that_of_rounds_after_the_first() -> None:
    found = rounds.time_per_round([drafted_call([(4, 2), (3, 1), (3, 0)]), plain_call()])
    assert found == pytest.approx({"draft": 0.05, "verify": 0.1, "overhead": 0.05, "draft_steps": 3.0})
    assert rounds.time_per_round([plain_call()]) is None and rounds.time_per_round([drafted_call([(4, 4)])]) is None


def test_methods_are_ranked_on_the_examples_that_all_have() -> None:
    """A result cut short: the slower method did not come to the example that is slow for all."""
    calls = [plain_call(0, method="quick", step=0.1), plain_call(1, method="quick", step=0.9)]
    calls.append(plain_call(0, method="slow", step=0.2))
    methods = [method("quick"), method("slow"), method("untried"), method("no rate")]
    calls.append(plain_call(0, method="no rate", tokens=1))
    result = result_of(calls, methods)
    rates = {name: speed.decode_rate(speed.calls_of(result, name)) for name in ("quick", "slow")}
    assert rates["slow"] > rates["quick"], "the control: by all that each has, the slower one is ahead"
    for listed in (methods, methods[::-1]):
        best = speed.fastest_of(result, listed)
        assert best is not None and best["name"] == "quick"
    apart = result_of([plain_call(0, method="quick"), plain_call(1, method="slow")], methods)
    assert speed.fastest_of(apart, methods) is None and speed.fastest_of(result, methods[2:]) is None


def test_baselines_are_found_by_what_they_are() -> None:
    methods = [
        method("plain"),
        method("none eager", "none", engine="eager", same_engine="none eager"),
        method("slow", "assisted"),
        method("quick", "assisted"),
        method("speculative", engine="eager", same_engine="none eager"),
    ]
    calls = [plain_call(), plain_call(method="slow", step=0.3), plain_call(method="quick", step=0.2)]
    calls += [plain_call(method="none eager"), drafted_call([(1, 1), (1, 1)])]
    result = result_of(calls, methods)
    found = {which: speed.baseline(result, methods[-1], which) for which in speed.BASELINES}
    assert {which: one and one["name"] for which, one in found.items()} == {
        "plain": "plain", "engine": "none eager", "assisted": "quick",
    }  # fmt: skip
    assert speed.baseline(result, methods[0], "plain") is None, "not over itself"
    assert speed.baseline(result, methods[0], "engine") is None
    switched = [one | {"cache": cache} for one in methods[:1] for cache in (True, False)]
    switched[1] |= {"name": "plain without"}
    other = method("ours", "speculative", cache=False)
    ablated = result_of([plain_call(), plain_call(method="plain without", step=0.9)], [*switched, other])
    same = speed.baseline(ablated, other, "plain")
    assert same is not None and same["name"] == "plain without", (
        "rows are held against rows that differ in nothing else"
    )


def test_tokens_until_a_cold_start_pays() -> None:
    cold = [
        {"method": "plain", "batch": 1, "length": 100, "seconds": [1.5, 1.0], "settled": True},
        {"method": "speculative", "batch": 1, "length": 100, "seconds": [6.0, 2.5, 1.0, 1.0], "settled": False},
    ]
    # 10 tokens/s, and 2 tokens in 0.1 s: 0.1 and 0.05 s a token.
    calls = [plain_call(), drafted_call([(1, 1), (1, 1)], seconds=1.1)]
    methods = [method("plain"), method("speculative")]
    result = result_of(calls, methods, cold=cold, loading_seconds={"small": 0.5, "large": 3.0})
    assert speed.cold_seconds(result, "speculative", 1) == pytest.approx(5.0 + 1.5)
    assert speed.cold_seconds(result, "plain", 1) == pytest.approx(0.5)
    assert speed.tokens_until_it_pays(result, "speculative", "plain") == pytest.approx((6.5 + 0.5 - 0.5) / 0.05)
    assert speed.tokens_until_it_pays(result, "plain", "speculative") is None, "the slower one never does"
    assert speed.cold_seconds(result, "speculative", 4) is None
    assert speed.unsettled(result) is not None and "speculative" in str(speed.unsettled(result))
    assert speed.unsettled(result | {"cold": cold[:1]}) is None


def test_what_methods_share_counts_for_each() -> None:
    engines = {"none compiled": "compiled", "γ = 4": "compiled", "γ = 6": "compiled", "plain": "generate"}
    methods = [method(name, engine=engine) for name, engine in engines.items()]
    own = {"γ = 6": 3.0, "none compiled": 8.0, "plain": 0.5, "γ = 4": 9.0}  # in a journal's order
    cold = [{"method": name, "batch": 1, "length": 9, "seconds": [1.0 + more, 1.0]} for name, more in own.items()]
    result = result_of([], methods, cold=cold)
    found = {name: speed.cold_seconds(result, name, 1) for name in engines}
    assert found == pytest.approx({"none compiled": 8.0, "γ = 4": 17.0, "γ = 6": 20.0, "plain": 0.5})
    numbered = [item | {"number": number} for number, item in enumerate(cold)]
    result = result_of([], methods, cold=numbered)
    found = {name: speed.cold_seconds(result, name, 1) for name in engines}
    assert found == pytest.approx({"γ = 6": 3.0, "none compiled": 11.0, "γ = 4": 20.0, "plain": 0.5}), "as warmed up"


def test_load_before_the_start_is_said() -> None:
    assert speed.busy({"environment": {"busy_cores": 0.5}}) is None
    assert "0.51 cores" in str(speed.busy({"environment": {"busy_cores": 0.51}}))


def test_prompts_of_one_question_are_drawn_together() -> None:
    """The same five answers at two lengths are no ten: the interval is that of five."""
    seconds = (1.5, 1.6, 1.7, 1.9, 2.0)
    methods = [method("plain"), method("speculative")]

    def found(lengths: int) -> speed.Ratio | None:
        pairs = [(plain_call(prompt=at), drafted_call([(2, 2), (2, 2)], prompt=at, seconds=seconds[at % 5]))
                 for at in range(5 * lengths)]  # fmt: skip
        result = result_of([call for both in pairs for call in both], methods)
        result["prompts"] = [{"index": at, "question": at % 5, "label": "qa"} for at in range(5 * lengths)]
        return speed.speedup(result, "speculative", "plain")

    one, two = found(1), found(2)
    assert one is not None and two is not None
    assert (two.value, two.low, two.high) == pytest.approx((one.value, one.low, one.high))


def test_equal_answers_count_once_where_tokens_are_counted() -> None:
    calls = [drafted_call([(2, 1)], prompt=at, repeat=repeat) for at in (0, 1) for repeat in range(7)]
    result = result_of(calls, [method("speculative")])
    result["prompts"] = [{"index": at, "question": 0, "label": "qa"} for at in (0, 1)]
    assert len(speed.distinct_calls(result, "speculative")) == 1
    result["prompts"][1]["question"] = 1
    assert len(speed.distinct_calls(result, "speculative")) == 2
