"""The tables: figures recomputed from the calls, baselines named, and warnings."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from helpers.tables import rows_of

from hf_specdec.bench.figures import bandwidth
from hf_specdec.bench.figures.bootstrap import Interval
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.reports.equal_outputs import differences, equal_outputs
from hf_specdec.bench.reports.heading import heading, remarks
from hf_specdec.bench.reports.markdown import approximate, difference, number, ratio, table
from hf_specdec.bench.reports.tables import ablation, benchmark, engines, methods
from hf_specdec.bench.running.timed_call import Call
from hf_specdec.bench.storage.results import SUFFIX, load

Result = dict[str, Any]


def calls(result: Result, method: str, prompts: set[int] | None = None, batch: int | None = None) -> list[Call]:
    return [
        call
        for call in result["calls"]
        if call.method == method and batch in (None, call.batch) and (prompts is None or set(call.prompts) <= prompts)
    ]


def after(call: Call) -> tuple[int, float]:
    """Tokens and seconds after the first delivery."""
    first = sum(call.rounds.new_tokens[0]) if call.rounds else call.batch
    return sum(len(row) for row in call.tokens) - first, call.seconds - call.first_seconds


def columns(call: Call) -> list[list[list[Any]]]:
    """Drafted, accepted and new tokens, and overlaps, a round an entry."""
    assert call.rounds is not None and call.rounds.overlap is not None
    return [call.rounds.drafted, call.rounds.accepted, call.rounds.new_tokens, call.rounds.overlap]


def rate(found: list[Call]) -> float:
    parts = [after(call) for call in found if after(call)[0] > 0]
    return sum(tokens for tokens, _ in parts) / sum(seconds for _, seconds in parts)


def first(cell: str) -> float:
    """The figure before its interval."""
    return float(cell.split(" ")[0])


def test_a_file_renders_as_when_it_was_measured(results_folder: Path) -> None:
    paths = list(results_folder.glob(f"*{SUFFIX}"))
    assert len(paths) == 6
    for path in paths:
        stem = path.name.removesuffix(SUFFIX)
        assert rendering.render(load(path)) == path.with_name(f"{stem}.md").read_text()


@pytest.mark.parametrize(
    ("task", "batch"), [("benchmark", None), ("subtasks", None), ("sampling", None), ("sweep", None), ("engines", 2)]
)
def test_rates_and_speedups_follow_from_the_calls(results: dict[str, Result], task: str, batch: int | None) -> None:
    result = results[task]
    shown = methods.shown_methods(result, batch=batch)
    rates = {m["name"]: rate(calls(result, m["name"], batch=batch)) for m in shown}
    assisted = [m["name"] for m in shown if m["kind"] == "assisted"]
    fastest = max(assisted, key=lambda name: rates[name], default=None)
    for method, row in zip(shown, rows_of(methods.speed_table(result, batch=batch)), strict=True):
        name = method["name"]
        assert float(row["Tokens/Sec"]) == pytest.approx(rates[name], abs=0.06)
        bases = {"plain generate()": "plain", "plain on the same engine": method["same_engine"],
                 "transformers' assisted generation": fastest}  # fmt: skip
        for words, base in bases.items():
            cell = row[f"Speedup over {words}"]
            if base in (None, name):
                assert cell == "–"
                continue
            assert first(cell) == pytest.approx(rates[name] / rates[base], abs=0.006)
            low, high = (float(end) for end in re.findall(r"\((.+)–(.+)\)", cell)[0])
            assert low <= first(cell) + 0.006 and first(cell) <= high + 0.006
        whole = calls(result, name, batch=batch)
        ends = sum(len(row) for call in whole for row in call.tokens) / sum(call.seconds for call in whole)
        assert float(row["Tokens/Sec, end to end"]) == pytest.approx(ends, abs=0.06)


def test_every_task_has_the_rows_of_all_baselines(results: dict[str, Result]) -> None:
    for task in ("benchmark", "subtasks", "sampling", "sweep", "ablation", "engines"):
        kinds = {method["kind"] for method in results[task]["methods"]}
        assert {"plain", "none", "assisted", "speculative"} <= kinds, task


def test_rounds_follow_from_the_calls(results: dict[str, Result]) -> None:
    result = results["benchmark"]
    groups = benchmark.by_length(result)
    assert list(groups) == ["20", "30", "all"]
    rows = rows_of(methods.round_table(result, groups, "Prompt length"))
    assert len(rows) == 3 * 3
    titles = {m["title"].lower(): m["name"] for m in result["methods"]}
    for row in rows:
        chosen = groups[row["Prompt length"]]
        found = calls(result, titles[row["Method"].lower()], None if chosen is None else set(chosen))
        rounds = [
            (drafted[0], accepted[0], new[0], overlap[0])
            for call in found
            if call.rounds
            for drafted, accepted, new, overlap in zip(
                call.rounds.drafted,
                call.rounds.accepted,
                call.rounds.new_tokens,
                call.rounds.overlap or [],
                strict=True,
            )
        ]
        assert row["Acceptance"] == f"{100 * sum(r[1] for r in rounds) / sum(r[0] for r in rounds):.1f}%"
        assert float(row["Tokens/Round"]) == pytest.approx(mean(r[2] for r in rounds), abs=0.006)
        reached = sum(min(r[1] + 1, r[0]) for r in rounds)
        assert float(row["α"]) == pytest.approx(sum(r[3] for r in rounds) / reached, abs=0.0006)


def test_example_rows_are_real_calls(results: dict[str, Result]) -> None:
    result = results["benchmark"]
    for method in ("plain", "speculative"):
        *rows, whole = rows_of(benchmark.example_table(result, method))
        assert [row["Example#"] for row in rows] == [str(n) for n in range(1, 11)] and whole["Example#"] == "all"
        assert ("Acceptance" in whole) == (method == "speculative")
        shown = []
        for place, row in enumerate(rows):
            # Of two repeats the faster one, which is the lower of the middle two.
            call = min(calls(result, method, {place}), key=lambda call: call.seconds)
            tokens, seconds = after(call)
            shown.append(call)
            assert float(row["Total Time (s)"]) == pytest.approx(call.seconds, abs=6e-4)
            assert float(row["Prefill Phase (ms)"]) == pytest.approx(1000 * call.first_seconds, abs=6e-3)
            assert float(row["Time/Token (ms)"]) == pytest.approx(1000 * seconds / tokens, abs=6e-3)
            assert float(row["Tokens/Sec"]) == pytest.approx(tokens / seconds, abs=0.06)
        assert float(whole["Tokens/Sec"]) == pytest.approx(rate(shown), abs=0.06)


def test_examples_that_end_at_once_have_no_rate(results: dict[str, Result]) -> None:
    result = copy.copy(results["benchmark"])
    result["calls"] = [
        replace(call, tokens=[row[:1] for row in call.tokens], rounds=None) if call.prompt == 1 else call
        for call in result["calls"]
    ]
    rows = rows_of(benchmark.example_table(result, "plain"))
    assert (rows[1]["Time/Token (ms)"], rows[1]["Tokens/Sec"]) == ("–", "–")
    assert all(row["Tokens/Sec"] != "–" for place, row in enumerate(rows) if place != 1)


def test_outputs_that_differ_are_counted_and_placed(results: dict[str, Result]) -> None:
    result = copy.copy(results["benchmark"])
    assert equal_outputs(result, "speculative", "plain") == "10 of 10"

    def changed(call: Call) -> Call:
        tokens = [list(call.tokens[0])]
        tokens[0][4] += 1
        return replace(call, tokens=tokens)

    result["calls"] = [
        changed(call) if call.method == "speculative" and call.prompt == 2 else call for call in result["calls"]
    ]
    assert differences(result, "speculative", "plain") == [((1, 2), 4)]
    assert "9 of 10 equal to plain generate(); first differences: example 3 at token 5" in benchmark.render(result)
    assert equal_outputs(results["sampling"], "speculative", "plain") == "–", "drawn"


def test_rows_of_a_batch_are_compared_one_by_one(results: dict[str, Result]) -> None:
    result = results["engines"]
    drafting = next(m["name"] for m in result["methods"] if m["kind"] == "speculative")
    assert equal_outputs(result, drafting, "plain", batch=3) == "3 of 3"


def test_the_ablation_names_both_baselines_of_a_row(results: dict[str, Result]) -> None:
    result = results["ablation"]
    rows = rows_of(ablation.ablation_table(result))
    by_name = {m["name"]: rate(calls(result, m["name"])) for m in result["methods"]}
    seen = 0
    for method, row in zip(result["methods"], rows, strict=True):
        flags = [row[column] == "yes" for column in ("Speculative decoding", "KV cache", "Better Transformer")]
        assert flags == [method[switch] for switch in ablation.SWITCHES]
        cell = row["Speedup over plain on the same engine, same cache and attention"]
        if method["same_engine"] is None:
            assert cell == "–"
            continue
        assert first(cell) == pytest.approx(by_name[method["name"]] / by_name[method["same_engine"]], abs=0.006)
        seen += 1
    assert seen == 4


def test_engines_say_where_drafting_is_faster_by_the_interval(results: dict[str, Result]) -> None:
    result = copy.copy(results["engines"])

    def timed(factor: float) -> Result:
        kinds = {m["name"]: m["kind"] for m in result["methods"]}
        calls = [
            replace(call, first_seconds=0.1, seconds=0.1 + 0.01 * (after(call)[0]) / (factor if drafting else 1.0))
            for call in result["calls"]
            for drafting in [kinds[call.method] == "speculative"]
        ]
        return {**result, "calls": calls}

    faster, slower = ("\n".join(engines.conclusions(timed(factor))) for factor in (2.0, 0.5))
    assert "is faster than plain decoding at batch size 1 (2.00" in faster and "not shown" not in faster
    assert "is slower than plain decoding at batch size 1 (0.50" in slower and "is faster than" not in slower


def test_engines_say_where_nothing_was_compiled(results: dict[str, Result]) -> None:
    result = results["engines"]
    passes = [{**item, "engine": "compiled"} for item in result["passes"] if item["engine"] == "eager"]
    assert passes and "Nothing was compiled" not in "\n".join(engines.conclusions({**result, "passes": passes}))
    empty = [{**item, "times": {"draft": {}, "target": {}}} for item in passes]
    said = "\n".join(engines.conclusions({**result, "passes": empty}))
    assert "Nothing was compiled at batch size 1" in said


def test_engines_say_what_one_call_cannot_tell(results: dict[str, Result]) -> None:
    result = results["engines"]
    once = [call for call in result["calls"] if call.repeat == 0 and call.prompt == result["calls"][0].prompt]
    said = "\n".join(engines.conclusions({**result, "calls": once}))
    assert "was called once, too little to tell, at batch size 1" in said
    at_once = [replace(call, tokens=[row[:1] for row in call.tokens], rounds=None) for call in result["calls"]]
    said = "\n".join(engines.conclusions({**result, "calls": at_once}))
    assert "Plain generate()" in said and "at batch size 1: no tokens after the first delivery" in said
    # Of plain decoding, which delivers token by token: "auto" may deliver such short texts at once.
    lacking = [line for line in engines.conclusions(result) if "no tokens after the first delivery" in line]
    assert not any("Plain generate()" in line for line in lacking)


BYTES_READ = 2**30


def read_at(result: Result, limit: float) -> Result:
    """The result of a model whose steps read `BYTES_READ`, and of memory that gave so many bytes per second."""
    readings = [
        {"method": call.method, "prompts": list(call.prompts), "repeat": call.repeat, "bytes_per_second": limit}
        for call in result["calls"]
    ]
    memory = {"context": 9, "weight_bytes": BYTES_READ, "cache_bytes": 0}
    return {**result, "memory": memory, "readings": readings}


def test_a_share_of_the_memorys_bandwidth_above_1_is_explained(results: dict[str, Result]) -> None:
    result = results["engines"]
    for factor, said in ((2.0, True), (0.5, False)):
        limit = rate(calls(result, "plain", batch=1)) * BYTES_READ / factor
        text = "\n".join(engines.conclusions(read_at(result, limit)))
        assert f"Plain generate() reaches {100 * factor:.1f}% of the bandwidth limit" in text
        assert (f"{100 * factor:.1f}% of the bandwidth limit: memory was read faster" in text) == said


def test_the_share_of_the_bandwidth_does_not_change_while_memory_is_slow(results: dict[str, Result]) -> None:
    result = read_at(results["engines"], 1e9)
    once = bandwidth.share(result, "plain")
    assert once is not None
    slow = [replace(c, seconds=3 * c.seconds, first_seconds=3 * c.first_seconds) if c.repeat else c
            for c in result["calls"]]  # fmt: skip
    readings = [r | {"bytes_per_second": 1e9 / 3} if r["repeat"] else r for r in result["readings"]]
    assert {call.repeat for call in slow} > {0}
    assert bandwidth.share({**result, "calls": slow, "readings": readings}, "plain") == pytest.approx(once)
    unpaired = bandwidth.share({**result, "calls": slow}, "plain")
    assert unpaired is not None and unpaired < 0.8 * once


def test_results_with_one_reading_of_memory_keep_their_share(results: dict[str, Result]) -> None:
    read = read_at(results["engines"], 1e9)
    memory = read["memory"] | {"read_bytes_per_second": 1e9}
    earlier = {key: value for key, value in read.items() if key != "readings"} | {"memory": memory}
    assert bandwidth.share(earlier, "plain") == pytest.approx(bandwidth.share(read, "plain"))
    assert "the device reads 1.0 GB/s at best." in "\n".join(engines.conclusions(earlier))


def test_the_load_of_the_machine_is_said_above_half_a_core(results: dict[str, Result]) -> None:
    result = results["benchmark"]
    for cores, said in ((0.4, False), (0.6, True)):
        changed = result | {"environment": result["environment"] | {"busy_cores": cores}}
        assert any("kept 0.60 cores busy" in line for line in remarks(changed)) == said


def test_unsteady_times_are_warned_about(results: dict[str, Result]) -> None:
    result = copy.copy(results["benchmark"])
    for spread, said in ((0.1, False), (0.6, True)):
        result["calls"] = [replace(call, seconds=1 + spread * call.repeat) for call in result["calls"]]
        assert any("Times are unsteady" in line for line in remarks(result)) == said
    single = [call for call in result["calls"] if not call.repeat]
    assert any("rests on a single run" in line for line in remarks(result | {"calls": single}))


def test_the_heading_describes_the_run(results: dict[str, Result]) -> None:
    text = heading(results["sweep"])
    assert "lookahead 1, 2, 3, auto" in text and "3 examples" not in text and "2 examples" in text
    assert "sampling (temperature 1" in heading(results["sampling"])
    assert "batch size 1, 2, 3" in heading(results["engines"])


def test_the_heading_counts_the_prompts_of_each_length(results: dict[str, Result]) -> None:
    """Two rows at a time, three prompts make one batch."""
    result = results["engines"]
    words = "- prompts: 3 of 20 tokens at batch size 1, 3; 2 of 20 tokens at batch size 2"
    assert words in heading(result).splitlines()
    once = [call for call in result["calls"] if call.batch == 1]
    assert "- prompts: 3 of 20 tokens" in heading(result | {"calls": once}).splitlines()
    prompts = [prompt | {"tokens": 20 + 10 * (prompt["index"] == 2)} for prompt in result["prompts"]]
    mixed = heading(result | {"calls": once, "prompts": prompts})
    assert "- prompts: 2 of 20 tokens and 1 of 30 tokens" in mixed.splitlines()


def test_a_head_shorter_than_asked_for_is_explained(results: dict[str, Result]) -> None:
    result = copy.copy(results["benchmark"])
    whole = benchmark.chosen_method(result)
    trimmed = {**whole, "name": "trimmed", "draft": f"{whole['draft']}, head of 1,800 tokens"}
    result["methods"] = [*result["methods"], trimmed]
    result["calls"] = result["calls"] + [replace(call, method="trimmed") for call in calls(result, whole["name"])]
    for asked, said in ((None, False), (1800, False), (2048, True)):
        result["arguments"] = result["arguments"] | {"draft_vocabulary": asked}
        line = f"head of 1,800 tokens: --draft_vocabulary {asked} asks for more, but the corpus holds no other tokens."
        assert (line in benchmark.render(result)) == said
        assert ("asks for more" in benchmark.render(result)) == said


def test_titles_say_where_acceptance_is_imposed(results: dict[str, Result]) -> None:
    result = results["benchmark"]
    models = {role: model | {"synthetic": "x"} for role, model in result["models"].items()}
    titles = [line for line in rendering.render(result | {"models": models}).splitlines() if line.startswith("#")]
    assert titles and all(line.endswith("(synthetic pair, acceptance imposed)") for line in titles)
    assert "imposed" not in rendering.render(result)


def test_how_figures_are_written() -> None:
    assert ratio(Interval(1.234, 1.0, 1.5)) == "1.23 (1.00–1.50)"
    assert ratio(Interval(1.234, None, None)) == "1.23" and ratio(None) == "–"
    assert difference(Interval(-0.31, -1.0, 0.25)) == "-0.3 (-1.0 to +0.2)"
    assert (approximate(1267.0), approximate(None), number(None, 2)) == ("1,300", "–", "–")
    lines = table(["a", "b", "c"], [["1", "x", "1.0"], ["2", "y", "–"]]).splitlines()
    assert re.fullmatch(r"\|:-+\|:-+\|-+:\|", lines[1]), "text to the left, figures to the right"
