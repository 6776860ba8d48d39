"""Rates, ratios, intervals and acceptance, against numbers worked out here from their definitions."""

import math
import random
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import pytest
from helpers.made_up_results import drafted_call, frame_of, method, part_of, plain_call, random_result, result_of

from hf_specdec.bench.figures import bootstrap, frames, speed
from hf_specdec.bench.figures.bootstrap import ENOUGH, Cells, interval
from hf_specdec.bench.figures.frames import Part, whole
from hf_specdec.bench.records import Call, ColdStart, Interval, Result
from hf_specdec.bench.running.rounds import counted_round, summary
from hf_specdec.bench.running.timed_call import digest

SEEDS = range(3)
METHODS = ("speculative", "plain")


@pytest.fixture(autouse=True)
def all_resamples(monkeypatch) -> None:
    """As many as a report has."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 2000)


def after_first(call: Call) -> tuple[int, float]:
    """Tokens and seconds after the first delivery."""
    return call.new_tokens - call.first_tokens, call.seconds - call.first_seconds


def named(result: Result, name: str) -> list[Call]:
    return [call for call in result.calls if call.method == name]


@pytest.mark.parametrize("seed", SEEDS)
def test_rates_are_their_definitions(seed: int) -> None:
    result, drafts = random_result(seed)
    calls = named(result, "speculative")
    assert [c.first_tokens for c in calls] == [drafted[0][1] + 1 for drafted in drafts.values()]
    tokens, seconds = (sum(part) for part in zip(*map(after_first, calls), strict=True))
    found = whole(result).of("speculative")
    assert speed.decode_rate(found) == pytest.approx(tokens / seconds)
    everything = sum(call.new_tokens for call in calls)
    assert speed.end_to_end_rate(found) == pytest.approx(everything / sum(call.seconds for call in calls))
    # Rates that counted all tokens, or all but one, would flatter speculation.
    assert everything / seconds > tokens / seconds < (everything - len(calls)) / seconds


def spec_bench(calls: list[Call], turns_of: dict[int, int]) -> float:
    """As evaluation/speed.py of Spec-Bench: the mean over questions of sum(new_tokens) / sum(wall_time)."""
    choices: dict[tuple[int, int], dict[str, list[float]]] = {}
    for call in calls:
        point = choices.setdefault((turns_of[call.prompts[0]], call.repeat), {"new_tokens": [], "wall_time": []})
        point["new_tokens"].append(call.new_tokens)
        point["wall_time"].append(call.seconds)
    return float(np.array([sum(p["new_tokens"]) / sum(p["wall_time"]) for p in choices.values()]).mean())


@pytest.mark.parametrize("seed", SEEDS)
def test_macro_is_spec_bench_s(seed: int) -> None:
    result, _ = random_result(seed)
    turns = {index: index // 2 for index in range(12)}
    rates = [spec_bench(named(result, name), turns) for name in METHODS]
    ratio = speed.speedup(whole(result), "speculative", "plain", by="macro")
    assert ratio is not None and ratio.value == pytest.approx(rates[0] / rates[1])
    # Neither the mean over turns nor that of decode rates.
    assert spec_bench(named(result, "speculative"), {i: i for i in turns}) != pytest.approx(rates[0], rel=1e-6)
    own = [[tokens / seconds for tokens, seconds in map(after_first, named(result, name))] for name in METHODS]
    assert mean(own[0]) / mean(own[1]) != pytest.approx(rates[0] / rates[1], rel=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_speedups_are_ratios_of_rates_on_the_same_examples(seed: int) -> None:
    result, _ = random_result(seed)
    for name, base in (("speculative", "plain"), ("speculative", "none recorded"), ("none recorded", "plain")):
        sides = [list(map(after_first, named(result, one))) for one in (name, base)]
        rates = [sum(t for t, _ in side) / sum(s for _, s in side) for side in sides]
        found = speed.speedup(whole(result), name, base)
        assert found is not None and found.value == pytest.approx(rates[0] / rates[1])
        assert found.low is not None and found.high is not None and found.low <= found.value <= found.high
    # A call that only one side has counts on neither.
    fewer = [c for c in result.calls if (c.method, c.prompts, c.repeat) != ("plain", (0,), 0)]
    lacking = replace(result, calls=fewer)
    both = [c for c in named(result, "speculative") if (c.prompts, c.repeat) != ((0,), 0)]
    ours = sum(t for t, _ in map(after_first, both)) / sum(s for _, s in map(after_first, both))
    theirs = [after_first(call) for call in named(lacking, "plain")]
    expected = ours / (sum(t for t, _ in theirs) / sum(s for _, s in theirs))
    found = speed.speedup(whole(lacking), "speculative", "plain")
    assert found is not None and found.value == pytest.approx(expected)


def test_a_call_without_decode_steps_has_no_rate() -> None:
    only_first = drafted_call([(4, 4)], seconds=1.0000001)
    assert speed.decode_rate(frame_of([only_first])) is None and speed.rate_interval(frame_of([only_first])) is None
    assert speed.decode_rate(frame_of([plain_call(tokens=1)])) is None
    # It neither adds to the rates of others nor to a speedup, not even through its baseline.
    assert speed.decode_rate(frame_of([only_first, plain_call()])) == pytest.approx(10.0)
    calls = [only_first, plain_call(step=100.0)]
    assert speed.speedup(part_of(calls), "speculative", "plain") is None
    calls += [drafted_call([(1, 1), (1, 1)], seconds=2.0, prompt=1), plain_call(1)]
    found = speed.speedup(part_of(calls), "speculative", "plain")
    assert found is not None and found.value == pytest.approx(2.0 / 10.0)
    assert (found.low, found.faster, found.slower) == (None, False, False)


def test_a_batch_counts_the_tokens_of_all_its_rows() -> None:
    outputs = (digest([1]), digest([2]))
    about: Any = {
        "prompts": (0, 1), "repeat": 0, "position": 0, "seconds": 3.0, "first_seconds": 1.0, "outputs": outputs,
    }  # fmt: skip
    calls = frame_of([Call(method="plain", **about, new_tokens=4, first_tokens=2)])
    assert (calls["decode_seconds"].sum(), calls["decode_tokens"].sum()) == (2.0, 2)
    drafted = summary([counted_round([2, 2], [2, 0], [3, 1], 2, 3), counted_round([2, 0], [1, 0], [2, 0], 2, 3)])
    ours = frame_of([Call(method="speculative", **about, new_tokens=6, **vars(drafted))])
    assert (ours["decode_seconds"].sum(), ours["decode_tokens"].sum()) == (2.0, 2)
    assert frames.waiting(ours) == 1 / 4
    assert frames.tokens_per_round(ours) == 6 / 3, "the row that has ended takes part in one round"
    assert frames.acceptance_rate(ours) == 3 / 6


def test_the_typical_call_is_a_real_one() -> None:
    calls = [plain_call(repeat=repeat, step=step) for repeat, step in enumerate((0.3, 0.1, 0.2))]
    assert list(speed.typical_calls(frame_of(calls))["repeat"]) == [2]
    assert list(speed.typical_calls(frame_of(calls[:2]))["repeat"]) == [1], "the lower of two"
    assert speed.spread(frame_of(calls)) == pytest.approx((4.0 - 2.0) / 3.0)
    assert speed.spread(frame_of(calls[:1])) is None


def two_level(cells: Cells, figure: Any, draws: int, seed: int) -> list[float]:
    """The bootstrap over examples, and of each over its repeats, in plain loops; sorted."""
    rng, values = random.Random(seed), []
    for _ in range(draws):
        chosen = [rng.choice(cells) for _ in cells]
        drawn = [rng.choice(cell) for cell in chosen for _ in cell]
        values.append(figure(*(sum(part) for part in zip(*drawn, strict=True))))
    return sorted(values)


def quotient(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (a / b) / (c / d)


def test_intervals_are_those_of_a_bootstrap_over_examples_and_repeats() -> None:
    """Of so many examples that the percentiles are hardly expanded."""
    rng = random.Random(1)
    cells = [
        [(rng.uniform(5, 9), rng.uniform(1, 2), 6.0, rng.uniform(2, 3)) for _ in range(1 + number % 3)]
        for number in range(60)
    ]
    found = interval(cells, quotient)
    values = two_level(cells, quotient, 3000, seed=2)
    low, high = values[round(0.025 * 3000)], values[round(0.975 * 3000) - 1]
    assert found is not None and found.low is not None and found.high is not None
    width = high - low
    assert found.low == pytest.approx(low, abs=0.1 * width) and found.high == pytest.approx(high, abs=0.1 * width)
    assert found == interval(cells, quotient), "the same cells, the same interval"
    assert interval([], quotient) is None


def test_drift_that_hits_both_sides_is_paired_away() -> None:
    rng = random.Random(3)
    drifts = [[rng.uniform(1, 4) for _ in range(5)] for _ in range(6)]
    paired = [[(10.0, drift, 10.0, 1.1 * drift) for drift in row] for row in drifts]
    # The other side at another moment.
    shuffled = [[(10.0, drift, 10.0, 1.1 * rng.uniform(1, 4)) for drift in row] for row in drifts]
    close, apart = interval(paired, quotient), interval(shuffled, quotient)
    assert close is not None and apart is not None
    assert (close.low, close.high) == pytest.approx((1.1, 1.1))
    assert apart.low is not None and apart.high is not None and apart.high - apart.low > 0.2


SPREAD, TRIALS = 0.3, 300
TRUTH = math.exp(SPREAD**2 / 2)  # the mean of the draws below


def drawn(count: int, seed: int, repeats: int = 1) -> Cells:
    draws = random.Random(seed)
    return [[(draws.lognormvariate(0, SPREAD), 1.0)] * repeats for _ in range(count)]


def over(ours: float, base: float) -> float:
    return ours / base


def test_enough_is_the_least_number_whose_range_is_a_95_percent_interval() -> None:
    assert 1 - 2 ** (1 - ENOUGH) >= 0.95 > 1 - 2 ** (2 - ENOUGH)


@pytest.mark.parametrize("count", range(1, ENOUGH + 2))
def test_fewer_examples_have_no_interval(count: int) -> None:
    for repeats in (1, 4):  # more of the same is no further example
        found = interval(drawn(count, 1, repeats), over)
        assert found is not None and (found.low is None) == (found.high is None) == (count < ENOUGH)


@pytest.mark.parametrize("count", [ENOUGH, 10])
def test_an_interval_holds_the_truth_about_as_often_as_it_says(count: int) -> None:
    hits = plain = 0
    for seed in range(TRIALS):
        cells = drawn(count, seed)
        found = interval(cells, over)
        assert found is not None and found.low is not None and found.high is not None
        hits += found.low <= TRUTH <= found.high
        if count == ENOUGH and seed < 100:
            values = two_level(cells, over, 200, seed)
            plain += values[5] <= TRUTH <= values[194]
    assert hits / TRIALS >= 0.9
    assert count > ENOUGH or plain < 88, "the control: plain percentiles are too narrow"


def test_faster_means_that_the_interval_excludes_1() -> None:
    assert Interval(1.2, 1.01, 1.4).faster and not Interval(1.2, 0.99, 1.4).faster
    assert Interval(0.9, 0.8, 0.99).slower and not Interval(0.9, 0.8, 1.01).slower
    assert not Interval(2.0).faster


@pytest.mark.parametrize("seed", SEEDS)
def test_acceptance_counts(seed: int) -> None:
    result, drafts = random_result(seed)
    calls = whole(result).of("speculative")
    rounds = [one for drafted in drafts.values() for one in drafted]
    drafted, accepted = sum(d for d, _ in rounds), sum(a for _, a in rounds)
    reached = sum(min(a + 1, d) for d, a in rounds)
    assert frames.acceptance_rate(calls) == pytest.approx(accepted / drafted)
    assert frames.tokens_per_round(calls) == pytest.approx(mean(a + 1 for _, a in rounds))
    assert frames.alpha(calls) == pytest.approx(accepted / reached, abs=1e-4)
    assert accepted / reached != pytest.approx(accepted / drafted, rel=1e-3), "positions never reached don't count"
    seen: set[tuple[int, str]] = set()
    by_position: dict[int, list[bool]] = {}
    for place, some in drafts.items():
        call = result.calls[place]
        if (key := (call.prompts[0] // 2, call.outputs[0])) not in seen:  # equal answers to a question count once
            seen.add(key)
            for d, a in some:
                for position in range(min(a + 1, d)):
                    by_position.setdefault(position, []).append(position < a)
    for place, (reached, share) in enumerate(frames.acceptance_by_position(calls)):
        hits = by_position[place]
        assert reached == len(hits) and share.low is not None and share.high is not None
        assert share.value == mean(hits) and share.low <= share.value <= share.high
    plain = frame_of([plain_call()])
    assert frames.acceptance_rate(plain) is None and frames.alpha(plain) is None
    assert frames.tokens_per_round(plain) is None and frames.acceptance_by_position(plain) == []


def test_alpha_is_unknown_where_a_method_does_not_tell() -> None:
    assert frames.alpha(frame_of([replace(drafted_call([(4, 2)]), overlap=None)])) is None


def test_the_time_of_a_round_is_that_of_rounds_after_the_first() -> None:
    found = frames.time_per_round(frame_of([drafted_call([(4, 2), (3, 1), (3, 0)]), plain_call()]))
    assert found == pytest.approx({"draft": 0.05, "verify": 0.1, "overhead": 0.05, "draft_steps": 3.0})
    assert frames.time_per_round(frame_of([plain_call()])) is None
    assert frames.time_per_round(frame_of([drafted_call([(4, 4)])])) is None


def test_methods_are_ranked_on_the_examples_that_all_have() -> None:
    """A result cut short: the slower method did not come to the example that is slow for all."""
    calls = [plain_call(0, method="quick", step=0.1), plain_call(1, method="quick", step=0.9)]
    calls.append(plain_call(0, method="slow", step=0.2))
    methods = [method("quick"), method("slow"), method("untried"), method("no rate")]
    calls.append(plain_call(0, method="no rate", tokens=1))
    part = part_of(calls, methods)
    rates = {name: speed.decode_rate(part.of(name)) or 0.0 for name in ("quick", "slow")}
    assert rates["slow"] > rates["quick"], "the control: by all that each has, the slower one is ahead"
    for listed in (methods, methods[::-1]):
        best = speed.fastest(part, listed)
        assert best is not None and best.name == "quick"
    apart = part_of([plain_call(0, method="quick"), plain_call(1, method="slow")], methods)
    assert speed.fastest(apart, methods) is None and speed.fastest(part, methods[2:]) is None


def test_baselines_are_found_by_what_they_are() -> None:
    methods = [
        method("plain"),
        method("none recorded", "none", engine="recorded"),
        method("slow", "assisted"),
        method("quick", "assisted"),
        method("speculative", engine="recorded", same_engine="none recorded"),
    ]
    calls = [plain_call(), plain_call(method="slow", step=0.3), plain_call(method="quick", step=0.2)]
    calls += [plain_call(method="none recorded"), drafted_call([(1, 1), (1, 1)])]
    part = part_of(calls, methods)
    found = {which: speed.baseline(part, methods[-1], which) for which in speed.BASELINES}
    assert {which: one and one.name for which, one in found.items()} == {
        "plain": "plain", "engine": "none recorded", "assisted": "quick",
    }  # fmt: skip
    assert speed.baseline(part, methods[0], "plain") is None, "not over itself"
    assert speed.baseline(part, methods[0], "engine") is None
    switched = [method("plain", cache=True), method("plain without", "plain", cache=False)]
    other = method("ours", "speculative", cache=False)
    ablated = part_of([plain_call(), plain_call(method="plain without", step=0.9)], [*switched, other])
    same = speed.baseline(ablated, other, "plain")
    assert same is not None and same.name == "plain without", "held against what differs in nothing else"


def test_tokens_until_a_cold_start_pays() -> None:
    cold = [
        ColdStart("plain", 1, 100, (1.5, 1.0), True),
        ColdStart("speculative", 1, 100, (6.0, 2.5, 1.0, 1.0), False, 1),
    ]
    # 10 tokens/s, and 2 tokens in 0.1 s: 0.1 and 0.05 s a token.
    calls = [plain_call(), drafted_call([(1, 1), (1, 1)], seconds=1.1)]
    plain, ours = methods = [method("plain"), method("speculative")]
    part = part_of(calls, methods, cold=cold, loading_seconds={"small": 0.5, "large": 3.0})
    assert speed.cold_seconds(part, ours, 1) == pytest.approx(5.0 + 1.5)
    assert speed.cold_seconds(part, plain, 1) == pytest.approx(0.5)
    assert speed.tokens_until_it_pays(part, ours, plain, 1) == pytest.approx((6.5 + 0.5 - 0.5) / 0.05)
    assert speed.tokens_until_it_pays(part, plain, ours, 1) is None, "the slower one never does"
    assert speed.cold_seconds(part, ours, 4) is None


def test_what_methods_share_counts_for_each() -> None:
    engines = {"none compiled": "compiled", "γ = 4": "compiled", "γ = 6": "compiled", "plain": "generate"}
    methods = [method(name, engine=engine) for name, engine in engines.items()]
    own = {"γ = 6": 3.0, "none compiled": 8.0, "plain": 0.5, "γ = 4": 9.0}  # as they were warmed up
    cold = [ColdStart(name, 1, 9, (1.0 + more, 1.0), True, number) for number, (name, more) in enumerate(own.items())]
    part = part_of([], methods, cold=cold)
    found = {one.name: speed.cold_seconds(part, one, 1) for one in methods}
    assert found == pytest.approx({"γ = 6": 3.0, "none compiled": 11.0, "γ = 4": 20.0, "plain": 0.5})


def test_prompts_of_one_question_are_drawn_together() -> None:
    """The same six answers at two lengths are no twelve: the interval is that of six."""
    seconds = (1.5, 1.6, 1.7, 1.9, 2.0, 2.2)

    def found(lengths: int) -> Interval | None:
        pairs = [(plain_call(prompt=at), drafted_call([(2, 2), (2, 2)], prompt=at, seconds=seconds[at % 6]))
                 for at in range(6 * lengths)]  # fmt: skip
        questions = {at: at % 6 for at in range(6 * lengths)}
        calls = [call for both in pairs for call in both]
        return speed.speedup(
            whole(result_of(calls, [method("plain"), method("speculative")], questions)), "speculative", "plain"
        )

    one, two = found(1), found(2)
    assert one is not None and two is not None and one.low is not None
    assert (two.value, two.low, two.high) == pytest.approx((one.value, one.low, one.high))


def test_parts_hold_what_is_asked_for() -> None:
    result, _ = random_result(1)
    part = whole(result)
    assert part.batch_sizes == [1] and part.labels == ["qa"] and len(part.methods) == 3
    assert set(part.where(repeat=1, method=None).calls["repeat"]) == {1}
    assert isinstance(part, Part) and frames.examples(part.calls) == 6, "two turns are one question"
