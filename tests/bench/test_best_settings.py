"""The sweep's tables and its best settings: published columns, the command, the keywords, the grid's edge."""

from __future__ import annotations

import shlex
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from helpers.tables import rows_of

from hf_specdec.bench.figures import passes, speed
from hf_specdec.bench.reports import best_settings
from hf_specdec.bench.reports.tables import sweep as sweep_tables

Result = dict[str, Any]


def timed(result: Result, rates: dict[str, float]) -> Result:
    """The result, its methods at these decode rates and all others at 1 token per second."""
    calls = []
    for call in result["calls"]:
        first = sum(call.rounds.new_tokens[0]) if call.rounds else 1
        seconds = (len(call.tokens[0]) - first) / rates.get(call.method, 1.0)
        calls.append(replace(call, first_seconds=0.1, seconds=0.1 + seconds))
    return result | {"calls": calls}


def test_published_columns_of_the_sweep(results: dict[str, Result]) -> None:
    result = results["sweep"]
    shown = [method for method in result["methods"] if method["kind"] != "bild"]
    for method, row in zip(shown, rows_of(sweep_tables.draft_table(result)), strict=True):
        calls = speed.calls_of(result, method["name"])
        drafted, accepted = (
            sum(sum(map(sum, getattr(call.rounds, key))) for call in calls if call.rounds)
            for key in ("drafted", "accepted")
        )
        acceptance = f"{accepted / drafted:.3f}" if drafted else "–"
        assert row["Mean acceptance rate"] == acceptance
        if method["kind"] == "speculative" and isinstance(method["lookahead"], int):
            costs = passes.costs(result, "eager", 1, method["draft"]).values()
            ratios = [cost.drafting(method["lookahead"]) / method["lookahead"] / cost.target[1] for cost in costs]
            assert float(row["Inference speed ratio (c)"]) == pytest.approx(sum(ratios) / len(ratios), abs=6e-4)
            assert row["n_lookahead"] == str(method["lookahead"]) and row["Parameters"].endswith("M")


def test_thresholds_of_each_row(results: dict[str, Result]) -> None:
    result = results["sweep"]
    rows = rows_of(sweep_tables.threshold_table(result))
    for method, row in zip(result["methods"], rows, strict=True):
        keywords = method["keywords"] if method["kind"] == "bild" else {}
        shown = row["Fallback"], row["Rollback"]
        assert shown == tuple(
            f"{keywords[k]:g}" if keywords else "–" for k in ("fallback_threshold", "rollback_threshold")
        )


def test_the_fastest_row_comes_with_its_command_and_keywords(results: dict[str, Result]) -> None:
    result = results["sweep"]
    rows = best_settings.methods_of(result, "speculative")
    auto = next(method for method in rows if method["lookahead"] == "auto")
    line = best_settings.recommendations(timed(result, {auto["name"]: 3.0}))[0]
    assert auto["title"] in line and "3.00" in line
    command, keywords = line.split("`")[1], line.split("`")[3]
    words = shlex.split(command)
    assert words[words.index("--num_assistant_tokens") + 1] == "auto", "auto takes part"
    assert words[words.index("--assistant_model") + 1] == auto["draft"]
    assert (
        keywords == "generate(…, assistant_model=draft, generation_strategy='speculative', num_assistant_tokens='auto')"
    )


def test_a_best_value_at_the_edge_of_the_grid_is_warned_about(results: dict[str, Result]) -> None:
    result = results["sweep"]
    by_lookahead = {m["lookahead"]: m for m in best_settings.methods_of(result, "speculative")}
    assert best_settings.at_the_edge(result, by_lookahead[2]) == []
    for edge, side in ((1, "lowest"), (3, "highest")):
        (line,) = best_settings.at_the_edge(result, by_lookahead[edge])
        assert line.startswith(f"--num_assistant_tokens {edge} is the {side} value tried")
        fastest = timed(result, {by_lookahead[edge]["name"]: 3.0})
        assert f"{line}." in best_settings.recommendations(fastest)


def test_thresholds_chosen_on_the_training_split_come_with_the_command_that_tests_them(
    results: dict[str, Result], script: ModuleType
) -> None:
    result = results["sweep"]
    row = best_settings.methods_of(result, "bild")[2]
    trained = timed(result, {row["name"]: 3.0})
    trained |= {"arguments": result["arguments"] | {"dataset": "embedded"}, "split": "train"}
    assert best_settings.chosen_row(trained)["name"] == row["name"]
    line = best_settings.recommendations(trained)[-1]
    assert row["title"] in line and "chosen on the split train" in line
    words = shlex.split(line.split("`")[1])
    assert words[words.index("--task") + 1] == "subtasks" and "--split" not in words, "heldout by default"
    script.complete(script.build_parser(), vars(script.build_parser().parse_args(words[1:])))  # refuses what is unused
    for name in ("fallback_threshold", "rollback_threshold"):
        assert float(words[words.index(f"--{name}") + 1]) == row["keywords"][name]


def test_commands_name_the_precision_and_place_of_their_row(results: dict[str, Result]) -> None:
    result = results["sweep"]
    elsewhere = {"draft_precision": "int8", "draft_device": "cpu", "device_map": "auto", "better_transformer": True}
    row = best_settings.methods_of(result, "speculative")[0]
    words = shlex.split(best_settings.command(result | {"arguments": result["arguments"] | elsewhere}, row))
    assert words[words.index("--draft_precision") + 1] == "int8" and words[words.index("--draft_device") + 1] == "cpu"
    assert words[words.index("--device_map") + 1] == "auto" and "--better_transformer" in words
    plain = shlex.split(best_settings.command(result, row))
    assert not {"--precision", "--device", "--device_map", "--dtype", "--better_transformer"} & set(plain)
