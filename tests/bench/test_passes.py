"""Figures from bare passes, against numbers worked out here from their definitions."""

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from helpers.made_up_results import drafted_call, method, part_of, plain_call

from hf_specdec.bench.figures import passes
from hf_specdec.bench.records import Asked, Memory, Pass


def passes_of(engine: str, length: int, draft: float | None, target: dict[int, float]) -> list[Pass]:
    drafting = [] if draft is None else [("draft", 1, seconds) for seconds in (draft, 9 * draft, draft)]
    times = [*drafting, *(("target", w, s) for w, once in target.items() for s in (once, once, 9 * once))]
    return [Pass(engine, "small", (0,), 0, length, *one) for one in times]


def test_efficiency_takes_bare_passes_on_the_engine_of_the_rounds() -> None:
    ours = [drafted_call([(2, 2), (2, 0), (1, 1)], seconds=1.0 + 4.0), plain_call(step=2.0, tokens=3)]
    plain, drafting = methods = [method("plain"), method("speculative", engine="recorded", lookahead=2)]
    eager = passes_of("recorded", 100, 0.2, {1: 1.0, 2: 1.1, 3: 1.5})
    longer = passes_of("recorded", 400, 20.0, {1: 100.0, 2: 110.0, 3: 150.0})
    generate = passes_of("generate", 100, 0.4, {1: 1.5})
    part = part_of(ours, methods, passes=[*eager, *longer, *generate])
    # After the first round: 2 + 1 draft steps of 0.2 s, passes of 3 and of 2 tokens.
    assert passes.efficiency(part, drafting) == pytest.approx((3 * 0.2 + 1.5 + 1.1) / 4.0)
    assert passes.efficiency(part, plain) == pytest.approx(2 * 1.5 / 4.0), "plain generate() by its own passes"
    assert passes.efficiency(part_of(ours, methods, passes=generate), drafting) is None, "not by another engine's"
    without = passes_of("recorded", 100, None, {1: 1.0, 2: 1.1, 3: 1.5})
    assert passes.efficiency(part_of(ours, methods, passes=without), drafting) is None
    assert passes.efficiency(part_of([plain_call(tokens=1)], methods, passes=generate), plain) is None


def test_cost_ratios_and_what_they_predict() -> None:
    calls = [drafted_call([(4, 4), (4, 1)], seconds=2.0), plain_call(method="none recorded", step=0.5, tokens=11)]
    methods = [
        method("none recorded", "none", engine="recorded"),
        method("speculative", engine="recorded", lookahead=4, same_engine="none recorded"),
    ]
    part = part_of(calls, methods, passes=passes_of("recorded", 100, 0.2, {1: 1.0, 5: 1.6}))
    costs = passes.costs(part.result, "recorded", 1, "small")[100]
    assert costs.ratios(4) == pytest.approx((0.2, 1.6))
    alpha, c, v = 5 / 6, 0.2, 1.6
    by_formula = (1 - alpha**5) / ((1 - alpha) * (4 * c + v))
    assert passes.predicted_speedup(alpha, c, v, 4) == pytest.approx(by_formula)
    assert passes.predicted_speedup(1.0, c, v, 4) == pytest.approx(5 / 2.4)
    assert passes.predicted(part, methods[1]) == pytest.approx(by_formula)
    # The formula knows neither drafts that end early nor drafts that cost nothing.
    unsteady: list[dict[str, Any]] = [{"lookahead": "auto"}, {"kind": "bild"}, {"kind": "lookup"}]
    unsteady += [{"keywords": {"entropy_threshold": 0.5}}, {"keywords": {"drafter": "suffix"}}]
    assert all(passes.predicted(part, replace(methods[1], **change)) is None for change in unsteady)
    assert passes.costs(part.result, "recorded", 1, "another") == {} and passes.costs(part.result, "compiled") == {}


def test_predictions_take_the_costs_that_belong_to_their_calls() -> None:
    calls = [drafted_call([(4, 4), (4, 1)], prompt=index) for index in range(4)]
    about = method("speculative", engine="recorded", lookahead=4)
    timed = [*passes_of("recorded", 100, 0.2, {1: 1.0, 5: 1.6}), *passes_of("recorded", 400, 0.2, {1: 2.0, 5: 2.4})]
    prompts = [Asked(index, index, "long" if index == 3 else "short", 350 if index == 3 else 100) for index in range(4)]
    part = part_of(calls, [about], passes=timed, prompts=prompts)
    # Of all: three calls of the one length and one of the other.
    expected = {"short": (0.2, 1.6), "long": (0.1, 1.2), None: (0.2 / 1.25, 1.8 / 1.25)}
    for label, (c, v) in expected.items():
        here = part.where(label=label)
        found = passes.costs_of(here, about)
        assert found is not None and found.ratios(4) == pytest.approx((c, v))
        assert passes.predicted(here, about) == pytest.approx(passes.predicted_speedup(5 / 6, c, v, 4))
    assert passes.costs_of(part.where(label="none"), about) is None


def test_widths_between_measured_ones_are_interpolated() -> None:
    costs = passes.Costs({2: 1.0, 4: 2.0}, {1: 10.0, 3: 14.0, 7: 16.0})
    assert [costs.verification(width) for width in (1, 2, 3, 4, 7, 9)] == [10, 12, 14, 14.5, 16, 16]
    assert [costs.drafting(steps) for steps in (0, 1, 2, 3, 5)] == [0, 1, 2, 4.5, 10]
    assert costs.ratios(2) == (0.1, 1.4)


def test_bare_passes_are_medians_over_all_samples() -> None:
    listed = [one for seconds in (0.1, 0.2, 0.7) for one in passes_of("recorded", 100, seconds, {1: seconds})]
    costs = passes.costs(part_of([], [], passes=listed).result, "recorded")[100]
    samples = [s for seconds in (0.1, 0.2, 0.7) for s in (seconds, seconds, 9 * seconds)]
    assert costs.target[1] == pytest.approx(median(samples)) and costs.draft[1] == pytest.approx(median(samples))


def test_the_share_of_the_bandwidth_does_not_change_while_memory_is_slow() -> None:
    plain, memory = method("plain"), Memory(9, 10**9, 0)

    def share(slow: float, rate: float) -> float | None:
        calls = [plain_call(0, repeat, step=0.1 * (slow if repeat else 1)) for repeat in (0, 1)]
        calls = [replace(call, read_rate=rate if call.repeat else 2e10) for call in calls]
        return passes.bandwidth_share(part_of(calls, [plain], memory=memory), plain)

    assert share(1, 2e10) == share(3, 2e10 / 3) == pytest.approx(0.5)
    assert share(3, 2e10) == pytest.approx(0.25), "the control"
