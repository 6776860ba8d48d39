"""Figures from bare passes, against numbers worked out here from their definitions."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from helpers.made_up_results import drafted_call, method, plain_call, result_of

from hf_specdec.bench.figures import passes, speed


def passes_of(engine: str, length: int, draft: float, target: dict[int, float]) -> dict[str, Any]:
    times = {"draft": {"1": [draft, 9 * draft, draft]}, "target": {str(w): [s, s, 9 * s] for w, s in target.items()}}
    return {"engine": engine, "draft": "small", "batch": 1, "length": length, "repeat": 0, "times": times}


def test_efficiency_takes_bare_passes_on_the_engine_of_the_rounds() -> None:
    ours = [drafted_call([(2, 2), (2, 0), (1, 1)], seconds=1.0 + 4.0), plain_call(step=2.0, tokens=3)]
    methods = [method("plain"), method("speculative", engine="eager", lookahead=2)]
    listed = [
        passes_of("eager", 100, 0.2, {1: 1.0, 2: 1.1, 3: 1.5}),
        passes_of("eager", 400, 20.0, {1: 100.0, 2: 110.0, 3: 150.0}),  # of longer prompts
        passes_of("generate", 100, 0.4, {1: 1.5}),
    ]
    result = result_of(ours, methods, passes=listed)
    # After the first round: 2 + 1 draft steps of 0.2 s, passes of 3 and of 2 tokens.
    assert passes.efficiency(result, ours[:1]) == pytest.approx((3 * 0.2 + 1.5 + 1.1) / 4.0)
    assert passes.efficiency(result, ours[1:]) == pytest.approx(2 * 1.5 / 4.0), "plain generate() by its own passes"
    assert passes.efficiency(result | {"passes": listed[2:]}, ours[:1]) is None, "not by another engine's"
    without_draft = {**listed[0], "times": {**listed[0]["times"], "draft": {}}}
    assert passes.efficiency(result | {"passes": [without_draft]}, ours[:1]) is None
    assert passes.efficiency(result, [plain_call(tokens=1)]) is None


def test_cost_ratios_and_what_they_predict() -> None:
    calls = [drafted_call([(4, 4), (4, 1)], seconds=2.0), plain_call(method="none eager", step=0.5, tokens=11)]
    methods = [
        method("none eager", "none", engine="eager", same_engine="none eager"),
        method("speculative", engine="eager", lookahead=4, same_engine="none eager"),
    ]
    result = result_of(calls, methods, passes=[passes_of("eager", 100, 0.2, {1: 1.0, 5: 1.6})])
    costs = passes.costs(result, "eager", 1, "small")[100]
    assert costs.ratios(4) == pytest.approx((0.2, 1.6))
    alpha, c, v = 5 / 6, 0.2, 1.6
    by_formula = (1 - alpha**5) / ((1 - alpha) * (4 * c + v))
    assert passes.predicted_speedup(alpha, c, v, 4) == pytest.approx(by_formula)
    assert passes.predicted_speedup(1.0, c, v, 4) == pytest.approx(5 / 2.4)
    assert passes.predicted(result, methods[1]) == pytest.approx(by_formula)
    # The formula knows neither drafts that end early nor drafts that cost nothing.
    unsteady: list[dict[str, Any]] = [{"lookahead": "auto"}, {"kind": "bild"}, {"kind": "lookup"}]
    unsteady += [{"keywords": {"entropy_threshold": 0.5}}, {"keywords": {"drafter": "lookup"}}]
    assert all(passes.predicted(result, methods[1] | change) is None for change in unsteady)
    assert passes.costs(result, "eager", 1, "another") == {} and passes.costs(result, "compiled") == {}


def test_predictions_take_the_costs_that_belong_to_their_calls() -> None:
    short, long = ([drafted_call([(4, 4), (4, 1)], prompt=index) for index in some] for some in ((0, 1, 2), (3,)))
    about = method("speculative", engine="eager", lookahead=4)
    timed = [passes_of("eager", 100, 0.2, {1: 1.0, 5: 1.6}), passes_of("eager", 400, 0.2, {1: 2.0, 5: 2.4})]
    result = result_of([*short, *long], [about], passes=timed)
    result["prompts"][3]["tokens"] = 350
    alpha = 5 / 6
    expected = {
        (0, 1, 2): (0.2, 1.6),
        (3,): (0.1, 1.2),
        # Three calls of the one length and one of the other.
        (0, 1, 2, 3): (0.2 / 1.25, 1.8 / 1.25),
    }
    for prompts, (c, v) in expected.items():
        found = passes.costs_of(result, about, speed.calls_of(result, "speculative", prompts=prompts))
        assert found is not None and found.ratios(4) == pytest.approx((c, v))
        by_formula = passes.predicted_speedup(alpha, c, v, 4)
        assert passes.predicted(result, about, prompts=prompts) == pytest.approx(by_formula)
    over_lengths = passes.pooled(list(passes.costs(result, "eager").values()))
    assert over_lengths is not None and over_lengths.ratios(4) != pytest.approx((0.16, 1.44)), "the control"
    assert passes.costs_of(result, about, []) is None


def test_a_share_of_the_allowed_speedup_is_lost_between_passes_and_by_waiting() -> None:
    methods = [
        method("none eager", "none", engine="eager", same_engine="none eager"),
        method("speculative", engine="eager", lookahead=4, same_engine="none eager"),
    ]
    # After the first round 2 tokens in a round of 3 s, whose bare passes take 2.4 s. Plain: 1.5 s a token.
    calls = [drafted_call([(4, 4), (4, 1)], seconds=1.0 + 3.0), plain_call(method="none eager", step=1.5, tokens=11)]
    listed = [passes_of("eager", 100, 0.2, {1: 1.0, 5: 1.6})]
    result = result_of(calls, methods, passes=listed)
    assert passes.share_of_allowed(result, methods[1]) == pytest.approx(2.4 / 3.0)
    assert passes.allowed(result, methods[1]) == pytest.approx(1.5 / (2.4 / 2))
    # A slow baseline makes drafting pay more; the share stays.
    slow = result_of([calls[0], plain_call(method="none eager", step=3.0, tokens=11)], methods, passes=listed)
    assert passes.share_of_allowed(slow, methods[1]) == pytest.approx(2.4 / 3.0)
    assert passes.allowed(slow, methods[1]) == pytest.approx(3.0 / (2.4 / 2))
    assert passes.share_of_allowed(result | {"passes": []}, methods[1]) is None


def test_widths_between_measured_ones_are_interpolated() -> None:
    costs = passes.Costs({2: 1.0, 4: 2.0}, {1: 10.0, 3: 14.0, 7: 16.0})
    assert [costs.verification(width) for width in (1, 2, 3, 4, 7, 9)] == [10, 12, 14, 14.5, 16, 16]
    assert [costs.drafting(steps) for steps in (0, 1, 2, 3, 5)] == [0, 1, 2, 4.5, 10]
    assert costs.ratios(2) == (0.1, 1.4)


def test_bare_passes_are_medians_over_all_samples() -> None:
    listed = [passes_of("eager", 100, seconds, {1: seconds}) for seconds in (0.1, 0.2, 0.7)]
    costs = passes.costs(result_of([], [], passes=listed), "eager")[100]
    samples = [s for seconds in (0.1, 0.2, 0.7) for s in (seconds, seconds, 9 * seconds)]
    assert costs.target[1] == pytest.approx(median(samples)) and costs.draft[1] == pytest.approx(median(samples))
