"""Figures from hand-made raw runs, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hf_specdec.bench.figures import speed


def plain_run(prompt: int = 0, repeat: int = 0, step: float = 0.1, tokens: int = 11) -> dict[str, Any]:
    """Prefill of 1 s, then a token every `step` seconds; nothing after the last one."""
    puts = [[1.0 + step * index, 1] for index in range(tokens)]
    return {
        "prompt": prompt, "method": "plain", "repeat": repeat, "seconds": puts[-1][0], "puts": puts,
        "tokens": list(range(tokens)), "rounds": None,
    }  # fmt: skip


def drafted_run(rounds: list[tuple[int, int]], seconds: float = 3.0, prompt: int = 0) -> dict[str, Any]:
    """Rounds are (drafted, accepted); the first delivery comes after 1 s."""
    listed = [
        {"drafted": d, "accepted": a, "new_tokens": a + 1, "overlap": a, "draft_steps": d, "width": d + 1}
        for d, a in rounds
    ]
    new = sum(item["new_tokens"] for item in listed)
    return {
        "prompt": prompt, "method": "speculative", "repeat": 0, "seconds": seconds,
        "puts": [[1.0, 1]] * new, "tokens": list(range(new)), "rounds": listed,
    }  # fmt: skip


FORWARDS = {"draft_step": [0.1, 0.3, 0.2], "target": {"1": [1.0], "2": [1.1], "3": [1.5]}}


def test_rates_leave_out_the_first_delivery() -> None:
    run = drafted_run([(4, 4), (4, 1), (2, 0)])
    assert speed.first_delivery(run) == (1.0, 5)
    assert speed.decode_part(run) == (2.0, 3)
    assert speed.micro_rate([run]) == pytest.approx(1.5)
    assert speed.end_to_end_rate([run]) == pytest.approx(8 / 3)


def test_a_run_without_decode_steps_has_no_rate() -> None:
    only_first = drafted_run([(4, 4)], seconds=1.0000001)
    assert speed.decode_part(only_first) is None
    assert speed.micro_rate([only_first]) is None
    assert speed.macro_rate([only_first]) is None
    assert speed.decode_part(plain_run(tokens=1)) is None
    assert speed.efficiency([only_first], {0: FORWARDS}) is None
    # It neither adds to the rates of others nor to a speedup, not even through its baseline.
    assert speed.micro_rate([only_first, plain_run()]) == pytest.approx(10.0)
    fast = {0: only_first, 1: drafted_run([(1, 1), (1, 1)], seconds=2.0, prompt=1)}
    base = {0: plain_run(step=100.0), 1: plain_run(1)}
    assert speed.speedup(fast, base) == pytest.approx(2.0 / 10.0)
    assert speed.speedup({0: only_first}, base) is None


def test_micro_weighs_by_tokens_and_macro_by_runs() -> None:
    runs = [plain_run(step=0.1, tokens=11), plain_run(1, step=0.2, tokens=2)]
    assert speed.micro_rate(runs) == pytest.approx(11 / 1.2)
    assert speed.macro_rate(runs) == pytest.approx((10.0 + 5.0) / 2)


def test_the_typical_run_is_a_real_one() -> None:
    runs = [plain_run(repeat=repeat, step=step) for repeat, step in enumerate((0.3, 0.1, 0.2))]
    assert speed.typical_run(runs)["repeat"] == 2
    assert speed.typical_run(runs[:2])["repeat"] == 1
    assert speed.typical_runs(runs, "plain") == {0: runs[2]}
    assert speed.typical_runs(runs, "plain", prompts=[5]) == {}
    assert speed.spread(runs) == pytest.approx((4.0 - 2.0) / 3.0)


def test_speedup_of_each_repeat() -> None:
    runs = [plain_run(repeat=repeat, step=step) for repeat, step in enumerate((0.1, 0.4))]
    runs += [dict(drafted_run([(4, 4), (4, 4)]), repeat=repeat) for repeat in (0, 1)]
    assert speed.speedup_by_repeat(runs, "speculative", "plain") == pytest.approx([0.25, 1.0])


def test_acceptance_counts() -> None:
    runs = [drafted_run([(4, 4), (4, 1)]), drafted_run([(2, 0), (0, 0)])]
    assert speed.acceptance_rate(runs) == pytest.approx(5 / 10)
    assert speed.tokens_per_round(runs) == pytest.approx((5 + 2 + 1 + 1) / 4)
    # Reached: 4 + (1 and the rejected one) + the rejected one + none.
    assert speed.alpha(runs) == pytest.approx(5 / 7)
    assert speed.acceptance_rate([plain_run()]) is None
    assert speed.tokens_per_round([plain_run()]) is None
    assert speed.alpha([plain_run()]) is None


def test_alpha_is_unknown_where_a_method_does_not_tell() -> None:
    run = drafted_run([(4, 2)])
    run["rounds"][0]["overlap"] = None
    assert speed.alpha([run]) is None


def test_cost_ratios_and_prediction() -> None:
    assert speed.cost_ratios(FORWARDS, lookahead=2) == pytest.approx((0.2, 1.5))
    alpha, c, v, gamma = 0.8, 0.2, 1.5, 4
    by_formula = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + v))
    assert speed.predicted_speedup(alpha, c, v, gamma) == pytest.approx(by_formula)
    assert speed.predicted_speedup(1.0, c, v, gamma) == pytest.approx(5 / 2.3)


def test_efficiency_is_the_share_that_forwards_need() -> None:
    run = drafted_run([(2, 2), (2, 0), (1, 1)], seconds=1.0 + 4.0)
    # After the first round: 2 + 1 draft steps of 0.2 s, passes of 3 and of 2 tokens.
    assert speed.needed_seconds(run, FORWARDS) == pytest.approx(3 * 0.2 + 1.5 + 1.1)
    assert speed.efficiency([run], {0: FORWARDS}) == pytest.approx(3.2 / 4.0)
    slow = plain_run(step=2.0, tokens=3)
    assert speed.efficiency([slow], {0: FORWARDS}) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("tokens", "position"), [([1, 2, 3], None), ([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)]
)
def test_first_divergence(tokens: list[int], position: int | None) -> None:
    assert speed.first_divergence(tokens, [1, 2, 3]) == position
