"""The rendered report: its columns, and its numbers recomputed from the JSON by a few lines of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from helpers.tiny_pair import save_pair

from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.reports.tables import benchmark as benchmark_tables
from hf_specdec.bench.running.methods import methods_for
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.tasks.benchmark import measure

COLUMNS = [
    "Example#", "Prompt Length (tokens)", "New Tokens Generated", "Total Time (s)", "Prefill Phase (ms)",
    "Time/Token (ms)", "Tokens/Sec",
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of a short run with all methods: 2 prompts at 2 lengths, 2 repeats."""
    folder = tmp_path_factory.mktemp("bench")
    target, draft = save_pair(folder)
    settings = Settings(
        model_name=str(target), assistant_model=str(draft), assisted_generation=True, prompt_lengths=(30, 60),
        max_new_tokens=9, repeats=2, output_dir=folder,
    )  # fmt: skip
    pair = load_pair(settings)
    prompts = benchmark_prompts(pair, settings.prompt_lengths, 2, settings.max_new_tokens)
    return results.save(measure(settings, pair, methods_for(settings, pair), prompts), settings)[0]


@pytest.fixture(scope="module")
def result(saved: Path) -> dict[str, Any]:
    return json.loads(saved.read_text())


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def middle(result: dict[str, Any], method: str, prompt: int) -> dict[str, Any]:
    """Of two repeats the faster one, which is the lower of the middle two."""
    runs = [r for r in result["runs"] if r["method"] == method and r["prompt"] == prompt]
    assert len(runs) == 2
    return min(runs, key=lambda run: run["seconds"])


def test_rendering_needs_the_json_only(saved: Path, result: dict[str, Any]) -> None:
    assert benchmark_tables.render(result) == saved.with_suffix(".md").read_text()


def test_columns_of_each_table(result: dict[str, Any]) -> None:
    assert cells(benchmark_tables.example_table(result, "plain"))[0] == COLUMNS
    for method in ("speculative", "assisted"):
        assert cells(benchmark_tables.example_table(result, method))[0] == [*COLUMNS, "Acceptance", "Tokens/Round"]


@pytest.mark.parametrize("method", ["plain", "speculative", "assisted"])
def test_rows_follow_from_the_raw_times(result: dict[str, Any], method: str) -> None:
    rows = cells(benchmark_tables.example_table(result, method))[2:]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "all"]
    assert [row[1] for row in rows] == ["30", "30", "60", "60", ""]
    tokens, seconds = 0, 0.0
    for prompt, row in enumerate(rows[:-1]):
        run = middle(result, method, prompt)
        first = run["rounds"][0]["new_tokens"] if run["rounds"] else 1
        after = len(run["tokens"]) - first
        tokens, seconds = tokens + after, seconds + run["seconds"] - run["puts"][0][0]
        assert int(row[2]) == len(run["tokens"])
        assert float(row[3]) == pytest.approx(run["seconds"], abs=6e-4)
        assert float(row[4]) == pytest.approx(1000 * run["puts"][0][0], abs=6e-3)
        rate = after / (run["seconds"] - run["puts"][0][0])
        assert float(row[5]) == pytest.approx(1000 / rate, abs=6e-3)
        assert float(row[6]) == pytest.approx(rate, abs=6e-2)
    runs = [middle(result, method, prompt) for prompt in range(4)]
    whole = sum(len(run["tokens"]) for run in runs), sum(run["seconds"] for run in runs)
    prefill = 1000 * mean(run["puts"][0][0] for run in runs)
    expected = [*whole, prefill, 1000 * seconds / tokens, tokens / seconds]
    for cell, value, digits in zip(rows[-1][2:7], expected, (0, 3, 2, 2, 1), strict=True):
        assert float(cell) == pytest.approx(value, abs=0.6 * 10**-digits)


def test_acceptance_follows_from_the_rounds(result: dict[str, Any]) -> None:
    for method in ("speculative", "assisted"):
        for prompt, row in enumerate(cells(benchmark_tables.example_table(result, method))[2:-1]):
            rounds = middle(result, method, prompt)["rounds"]
            drafted, accepted = (sum(item[key] for item in rounds) for key in ("drafted", "accepted"))
            assert row[7] == f"{100 * accepted / drafted:.1f}%"
            assert row[8] == f"{sum(item['new_tokens'] for item in rounds) / len(rounds):.2f}"


def test_both_loops_do_the_same_rounds_in_greedy_decoding(result: dict[str, Any]) -> None:
    for prompt in range(4):
        ours, theirs = middle(result, "speculative", prompt), middle(result, "assisted", prompt)
        assert ours["tokens"] == theirs["tokens"]
        for key in ("drafted", "accepted", "new_tokens"):
            assert [item[key] for item in ours["rounds"]] == [item[key] for item in theirs["rounds"]]


def after(run: dict[str, Any]) -> tuple[int, float]:
    """Tokens and seconds after the first delivery."""
    first = run["rounds"][0]["new_tokens"] if run["rounds"] else 1
    return len(run["tokens"]) - first, run["seconds"] - run["puts"][0][0]


def speedup(result: dict[str, Any], method: str, base: str, prompts: Sequence[int], ends: bool = False) -> list[float]:
    """The ratio of micro rates in each of both repeats; of end-to-end rates with `ends`."""
    ratios = []
    for repeat in range(2):
        rates = []
        for name in (method, base):
            runs = [
                r for r in result["runs"] if (r["method"], r["repeat"]) == (name, repeat) and r["prompt"] in prompts
            ]
            parts = [(len(r["tokens"]), r["seconds"]) if ends else after(r) for r in runs]
            rates.append(sum(tokens for tokens, _ in parts) / sum(seconds for _, seconds in parts))
        ratios.append(rates[0] / rates[1])
    return ratios


def test_last_lines_name_their_baselines(result: dict[str, Any]) -> None:
    lines = benchmark_tables.render(result).splitlines()[-2:]
    named = (("plain", "plain decoding"), ("assisted", "transformers' assisted generation"))
    for line, (base, title) in zip(lines, named, strict=True):
        ratios = speedup(result, "speculative", base, range(4))
        end_to_end = median(speedup(result, "speculative", base, range(4), ends=True))
        shown = [float(figure) for figure in re.findall(r"\d+\.\d\d", line)]
        assert f"over {title}" in line
        assert shown == pytest.approx([median(ratios), min(ratios), max(ratios), end_to_end], abs=0.006)


def forwards_at(result: dict[str, Any], prompt: int) -> dict[str, float]:
    """The medians of the raw forwards at a prompt's length: "draft", and by width."""
    times = result["raw_forwards"]["30" if prompt < 2 else "60"]
    return {"draft": median(times["draft_step"])} | {width: median(t) for width, t in times["target"].items()}


def test_every_number_of_the_summary(result: dict[str, Any]) -> None:
    header, _, *rows = cells(benchmark_tables.summary_table(result))
    for name, row in zip(("plain", "speculative", "assisted"), rows, strict=True):
        shown = dict(zip(header, row, strict=True))
        runs = [middle(result, name, prompt) for prompt in range(4)]
        parts = [after(run) for run in runs]
        measured = sum(seconds for _, seconds in parts)
        assert float(shown["Tokens/Sec (micro)"]) == pytest.approx(sum(n for n, _ in parts) / measured, abs=0.06)
        assert float(shown["Tokens/Sec (macro)"]) == pytest.approx(mean(n / s for n, s in parts), abs=0.06)
        ends = sum(len(run["tokens"]) for run in runs) / sum(run["seconds"] for run in runs)
        assert float(shown["Tokens/Sec (end to end)"]) == pytest.approx(ends, abs=0.06)
        needed = 0.0
        for prompt, run in enumerate(runs):
            forwards = forwards_at(result, prompt)
            needed += after(run)[0] * forwards["1"] if run["rounds"] is None else 0.0
            for item in (run["rounds"] or ())[1:]:
                needed += item["draft_steps"] * forwards["draft"] + forwards[str(item["width"])]
        assert float(shown["η"]) == pytest.approx(needed / measured, abs=0.006)
        rounds = [item for run in runs for item in run["rounds"] or ()]
        if not rounds:
            assert [shown[column] for column in ("Acceptance", "Tokens/Round", "α")] == ["–"] * 3
            continue
        drafted, accepted = (sum(item[key] for item in rounds) for key in ("drafted", "accepted"))
        assert shown["Acceptance"] == f"{100 * accepted / drafted:.1f}%"
        assert shown["Tokens/Round"] == f"{sum(item['new_tokens'] for item in rounds) / len(rounds):.2f}"
        reached = sum(min(item["accepted"] + 1, item["drafted"]) for item in rounds)
        assert shown["α"] == f"{sum(item['overlap'] for item in rounds) / reached:.3f}"
        assert shown["Outputs as plain"] == "4 of 4"


def test_every_number_of_the_costs(result: dict[str, Any]) -> None:
    header, _, *rows = cells(benchmark_tables.cost_table(result))
    named = [(prompts, name) for prompts in ((0, 1), (2, 3)) for name in ("speculative", "assisted")]
    for (prompts, name), row in zip(named, rows, strict=True):
        shown = dict(zip(header, row, strict=True))
        forwards = forwards_at(result, prompts[0])
        assert shown["Prompt Length (tokens)"] == ("30" if prompts == (0, 1) else "60")
        for column, key in (("Draft step", "draft"), ("Target step", "1"), ("Verification of 5", "5")):
            assert float(shown[f"{column} (ms)"]) == pytest.approx(1000 * forwards[key], abs=0.006)
        c, v = forwards["draft"] / forwards["1"], forwards["5"] / forwards["1"]
        assert (float(shown["c"]), float(shown["v"])) == pytest.approx((c, v), abs=0.0006)
        rounds = [item for prompt in prompts for item in middle(result, name, prompt)["rounds"]]
        reached = sum(min(item["accepted"] + 1, item["drafted"]) for item in rounds)
        alpha = sum(item["overlap"] for item in rounds) / reached
        assert shown["α"] == f"{alpha:.3f}"
        assert float(shown["Predicted speedup"]) == pytest.approx(
            (1 - alpha**5) / ((1 - alpha) * (4 * c + v)), abs=0.006
        )
        measured = median(speedup(result, name, "plain", prompts))
        assert float(shown["Measured speedup"]) == pytest.approx(measured, abs=0.006)


def test_outputs_are_compared_with_plain(result: dict[str, Any]) -> None:
    assert "equal to plain decoding's on every example" in benchmark_tables.render(result)
    changed = json.loads(json.dumps(result))
    for run in changed["runs"]:
        if run["method"] == "speculative" and run["prompt"] == 2:
            run["tokens"][4] += 1
    text = benchmark_tables.render(changed)
    assert "3 of 4 equal plain decoding's; first differences: example 3 at token 5" in text


def test_an_example_that_ends_at_once_is_shown_without_a_rate(result: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(result))
    for run in changed["runs"]:
        if run["prompt"] == 1:
            first = run["rounds"][0]["new_tokens"] if run["rounds"] else 1
            run["tokens"], run["puts"] = run["tokens"][:first], run["puts"][:first]
            run["rounds"] = run["rounds"] and run["rounds"][:1]
    for method in ("plain", "speculative", "assisted"):
        rows = cells(benchmark_tables.example_table(changed, method))[2:]
        assert rows[1][5:7] == ["–", "–"]
        assert all(row[6] != "–" for index, row in enumerate(rows) if index != 1)


def test_everything_that_a_reader_needs_to_judge_is_recorded(result: dict[str, Any]) -> None:
    assert len(result["runs"]) == 3 * 4 * 2
    assert [run["position"] for run in result["runs"]] == list(range(24))
    assert {"commit", "dirty", "packages", "cpu", "torch_threads", "date"} <= set(result["environment"])
    assert result["arguments"]["prompt_lengths"] == [30, 60]
    for forwards in result["raw_forwards"].values():
        assert set(forwards["target"]) == {"1", "2", "3", "4", "5"}
        assert len(forwards["draft_step"]) == 4 * len(forwards["target"]["5"]) * 5
