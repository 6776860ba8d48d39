"""The task `engines`: what it runs, its numbers recomputed from the JSON, and its verdicts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from helpers.tiny_pair import save_pair

from hf_specdec.bench.figures import bandwidth, engine_speed
from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.reports.pictures.by_task import pictures
from hf_specdec.bench.reports.tables import engines as engines_tables
from hf_specdec.bench.running.engine_methods import contestants
from hf_specdec.bench.running.engine_passes import Forwards, keeping_engines, prepared_times
from hf_specdec.bench.running.timed_batch import endless, run_batch
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.tasks import engines
from hf_specdec.lengths.auto_length import AutoLength
from hf_specdec.prepared import cuda_graphs

ASSISTED = 6  # settings of transformers' own


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("engines")
    target, draft = save_pair(folder)
    return Settings(
        task="engines", model_name=str(target), assistant_model=str(draft), assisted_generation=True,
        prompt_lengths=(30,), max_new_tokens=12, repeats=2, limit=2, batch_sizes=(1, 2), engines=("eager", "static"),
        lookaheads=(2, 3), output_dir=folder / "out",
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair(settings: Settings) -> LoadedPair:
    return load_pair(settings)


@pytest.fixture(scope="module")
def saved(settings: Settings) -> Path:
    engines.run_engines(settings)
    return settings.output_dir / "engines-greedy.json"


@pytest.fixture(scope="module")
def result(saved: Path) -> dict[str, Any]:
    return json.loads(saved.read_text())


def cells(table: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: row for row in rows}


def rate_by_repeat(result: dict[str, Any], method: str, batch: int) -> list[float]:
    rates = []
    for repeat in (0, 1):
        tokens = seconds = 0.0
        for run in result["runs"]:
            if (run["method"], run["batch"], run["repeat"]) == (method, batch, repeat):
                first = sum(run["rounds"]["new_tokens"][0]) if run["rounds"] else batch
                tokens += 12 * batch - first
                seconds += run["seconds"] - run["first_seconds"]
        rates.append(tokens / seconds)
    return rates


def test_every_method_decodes_plain_tokens_at_every_batch_size(result: dict[str, Any]) -> None:
    plain = {(r["batch"], r["group"]): r["tokens"] for r in result["runs"] if r["method"] == "plain"}
    for run in result["runs"]:
        assert run["tokens"] == plain[run["batch"], run["group"]]
        assert [len(row) for row in run["tokens"]] == [12] * run["batch"]
        if run["rounds"] is not None:
            assert [sum(row) for row in zip(*run["rounds"]["new_tokens"], strict=True)] == [12] * run["batch"]


def test_methods_take_turns_and_transformers_assisted_runs_one_row_only(result: dict[str, Any]) -> None:
    kinds = {method["name"]: method["kind"] for method in result["methods"]}
    assert Counter(kinds.values())["assisted"] == ASSISTED
    for batch, groups in ((1, {0, 1}), (2, {0})):
        runs = [run for run in result["runs"] if run["batch"] == batch]
        assert {run["group"] for run in runs} == groups
        alone = {name for name, kind in kinds.items() if kind in ("assisted", "floor")}
        expected = set(kinds) if batch == 1 else set(kinds) - alone
        for group in groups:
            for repeat in (0, 1):
                turn = [run for run in runs if (run["group"], run["repeat"]) == (group, repeat)]
                assert {run["method"] for run in turn} == expected
                positions = [run["position"] for run in turn]
                assert sorted(positions) == list(range(min(positions), min(positions) + len(expected)))


def test_rows_follow_from_the_raw_times(result: dict[str, Any]) -> None:
    rates = {m["name"]: rate_by_repeat(result, m["name"], 1) for m in result["methods"]}
    best = max((name for name in rates if name.startswith("assisted")), key=lambda name: median(rates[name]))
    rows = cells(engines_tables.method_table(result, 1))
    for method in result["methods"]:
        row, mine = rows[method["title"][0].upper() + method["title"][1:]], rates[method["name"]]
        assert float(row[1]) == pytest.approx(median(mine), abs=0.06)
        for column, base in ((2, "plain"), (3, best)):
            ratios = [ours / theirs for ours, theirs in zip(mine, rates[base], strict=True)]
            assert float(row[column].split()[0]) == pytest.approx(median(ratios), abs=6e-3)
            if "(" in row[column]:
                low, high = row[column].split("(")[1].rstrip(")").split(" to ")
                assert [float(low), float(high)] == pytest.approx([min(ratios), max(ratios)], abs=6e-3)
        assert row[-1] == "2 of 2"


@pytest.mark.parametrize("batch", [1, 2])
def test_acceptance_and_alpha_follow_from_the_rounds(result: dict[str, Any], batch: int) -> None:
    rows = cells(engines_tables.method_table(result, batch))
    for method in result["methods"]:
        runs = [run for run in result["runs"] if (run["method"], run["batch"]) == (method["name"], batch)]
        if not runs or runs[0]["rounds"] is None:
            continue
        drafted = accepted = reached = overlap = new = live = 0
        for run in runs:
            rounds = run["rounds"]
            columns = [rounds[key] for key in ("drafted", "accepted", "new_tokens", "overlap")]
            for d, a, n, o in ((x, y, z, w) for c in zip(*columns, strict=True) for x, y, z, w in zip(*c, strict=True)):
                drafted, accepted, new, live = drafted + d, accepted + a, new + n, live + (n > 0)
                reached, overlap = reached + min(a + 1, d), overlap + o
        row = rows[method["title"][0].upper() + method["title"][1:]]
        assert row[5] == (f"{100 * accepted / drafted:.1f}%" if drafted else "–")
        assert float(row[6]) == pytest.approx(new / live, abs=6e-3)
        assert row[7] == "–" if not reached else float(row[7]) == pytest.approx(overlap / reached, abs=6e-4)


def test_what_is_allowed_follows_from_raw_forwards(result: dict[str, Any]) -> None:
    passes = [f["times"] for f in result["forwards"] if (f["batch"], f["engine"]) == (2, "eager")]
    step = median(seconds for item in passes for seconds in item["draft"]["1"])
    widths = {int(w): median(s for item in passes for s in item["target"][w]) for w in passes[0]["target"]}
    rows = [line.strip("|").split("|") for line in engines_tables.allowed_table(result).splitlines()[2:]]
    (row,) = [row for row in rows if [cell.strip() for cell in row[:3]] == ["2", "eager", "3"]]
    name = "speculative, γ = 3, eager"
    alpha = float(cells(engines_tables.method_table(result, 2))["Speculative, γ = 3, eager"][7])
    c, v = step / widths[1], widths[4] / widths[1]
    allowed = sum(alpha**power for power in range(4)) / (3 * c + v)
    over_plain = zip(rate_by_repeat(result, name, 2), rate_by_repeat(result, "plain", 2), strict=True)
    measured = median(ours / plain for ours, plain in over_plain)
    assert [float(cell) for cell in row[3:6]] == pytest.approx([alpha, c, v], abs=6e-4)
    assert float(row[8]) == pytest.approx(allowed, rel=0.01, abs=6e-3)
    assert float(row[9]) == pytest.approx(measured, abs=6e-3)
    assert float(row[10]) == pytest.approx(measured / allowed, rel=0.01, abs=6e-3)
    ended = [new == 0 for run in result["runs"] if (run["method"], run["batch"]) == (name, 2)
             for row_of_new in run["rounds"]["new_tokens"] for new in row_of_new]  # fmt: skip
    waiting = sum(ended) / len(ended)
    assert float(row[7].strip().rstrip("%")) == pytest.approx(100 * waiting, abs=0.06)


def test_efficiency_is_the_passes_share_of_the_time(result: dict[str, Any]) -> None:
    name, passes = "speculative, γ = 2, eager", engine_speed.costs(result, "eager", 1)
    assert passes is not None
    needed = measured = 0.0
    for run in result["runs"]:
        if (run["method"], run["batch"]) == (name, 1):
            measured += run["seconds"] - run["first_seconds"]
            needed += sum(run["rounds"]["draft_steps"][1:]) * passes.draft[1]
            needed += sum(passes.verification(width) for width in run["rounds"]["width"][1:])
    row = cells(engines_tables.method_table(result, 1))["Speculative, γ = 2, eager"]
    assert float(row[8]) == pytest.approx(needed / measured, abs=6e-3)


def test_widths_between_measured_ones_are_interpolated() -> None:
    passes = engine_speed.Costs({2: 1.0, 4: 2.0}, {1: 10.0, 3: 14.0, 7: 16.0})
    assert [passes.verification(width) for width in (1, 2, 3, 4, 7, 9)] == [10, 12, 14, 14.5, 16, 16]
    assert [passes.drafting(steps) for steps in (0, 1, 2, 3, 5)] == [0, 1, 2, 4.5, 10]
    assert passes.ratios(2) == (0.1, 1.4)


def test_rendering_needs_the_json_only(saved: Path, result: dict[str, Any]) -> None:
    assert engines_tables.render(result) == saved.with_suffix(".md").read_text()
    drawn = pictures(result)
    assert set(drawn) == {"speed-by-method", "speed-by-batch"}
    for axes in (figure.axes[0] for figure in drawn.values()):
        assert axes.get_xlabel() and axes.get_title()
    bars = [bar.get_width() for bar in drawn["speed-by-method"].axes[0].patches]
    assert bars[0] == pytest.approx(median(rate_by_repeat(result, "plain", 1)))


def test_a_run_that_was_broken_off_goes_on(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()
    real = engines.run_batch

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls["all"] += 1
        if calls["all"] == 9:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(engines, "run_batch", counted)
    short = replace(settings, repeats=1, batch_sizes=(1,), limit=1, max_new_tokens=4, output_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        engines.run_engines(short)
    engines.run_engines(short)
    result = json.loads((tmp_path / "engines-greedy.json").read_text())
    assert len(result["runs"]) == len(result["methods"]) == len({run["method"] for run in result["runs"]})
    # Three calls a method, the broken one, and no second warm-up or run of the two that were finished.
    assert calls["all"] == 3 * len(result["methods"]) + 1 + 2
    assert not list(tmp_path.glob("*.jsonl"))


def test_sampling_draws_as_many_tokens(settings: Settings, pair: LoadedPair) -> None:
    drawn = replace(settings, do_sample=True, top_k=0)
    prompts = benchmark_prompts(pair, (30,), 2, 12)
    for method in contestants(drawn, pair):
        run = run_batch(pair, method, prompts[: method.facts["most_rows"]], drawn)
        assert all(len(row) == 12 for row in run.tokens)
    by_block = {m.facts["engine"] for m in contestants(drawn, pair) if m.options.get("verification") == "block"}
    assert by_block == set(drawn.engines)
    assert not any("verification" in method.options for method in contestants(settings, pair))


def test_encoder_decoder_pairs(tmp_path: Path, settings: Settings) -> None:
    target, draft = save_pair(tmp_path, encoder_decoder=True)
    asked = replace(settings, model_name=str(target), assistant_model=str(draft))
    pair = load_pair(asked)
    prompts = benchmark_prompts(pair, (30,), 2, 12)
    by_kind = {method.facts["kind"]: method for method in contestants(asked, pair)}
    runs = [run_batch(pair, by_kind[kind], prompts, asked) for kind in ("plain", "fixed")]
    assert runs[0].tokens == runs[1].tokens
    for engine in ("eager", "static"):
        times = Forwards(pair, asked, [1, 3]).sample(engine, prompts)
        assert times is not None and set(times["target"]) == {"1", "3"}
    assert Forwards(pair, asked, [1, 3]).sample("compiled", prompts) is None, "nothing was compiled for them"
    assert bandwidth.describe(pair, 30)["cache_bytes"] is None


def test_texts_do_not_end_and_eos_is_put_back(pair: LoadedPair) -> None:
    before = [model.generation_config.eos_token_id for model in pair.models]
    assert None not in before
    with pytest.raises(KeyError), endless(pair):
        assert all(model.generation_config.eos_token_id is None for model in pair.models)
        raise KeyError
    assert [model.generation_config.eos_token_id for model in pair.models] == before


def made_up(speeds: dict[tuple[str, str, int], float], device: str = "cpu", tokens: int = 128) -> dict[str, Any]:
    """A result in which each (kind, engine, batch) decodes at this many tokens/s, α = 1, in rounds of 3 tokens."""
    runs, methods = [], {}
    for (kind, engine, batch), speed in speeds.items():
        name = kind if (kind, engine) == ("plain", "eager") else f"{kind} {engine}"
        methods[name] = {
            "name": name, "title": name, "kind": kind, "engine": engine, "lookahead": 2 if kind == "fixed" else None,
        }  # fmt: skip
        rounds = None
        first = 1
        if kind in ("fixed", "auto", "floor"):
            first, count = 3, tokens // 3
            rounds = {
                "drafted": [[2] * batch] * count, "accepted": [[2] * batch] * count,
                "new_tokens": [[3] * batch] * count, "overlap": [[2.0] * batch] * count,
                "draft_steps": [2] * count, "width": [3] * count,
            }  # fmt: skip
        seconds = batch * (tokens - first) / speed
        runs.append(
            {"batch": batch, "group": 0, "repeat": 0, "method": name, "seconds": 1 + seconds, "first_seconds": 1.0,
             "tokens": [[0] * tokens] * batch, "rounds": rounds}
        )  # fmt: skip
    times = {"draft": {"1": [0.1]}, "target": {"1": [1.0], "3": [1.3]}}
    forwards = [{"engine": engine, "batch": batch, "times": times} for _, engine, batch in speeds]
    return {
        "runs": runs, "methods": list(methods.values()), "forwards": forwards, "sampling": False,
        "models": {"target": {"device": device}}, "arguments": {"max_new_tokens": tokens}, "first_calls": [],
        "memory": {"weight_bytes": 900, "cache_bytes": 100, "copy_bytes_per_second": 50_000.0, "context": 10},
        "notes": [],
    }  # fmt: skip


def test_the_bandwidth_that_plain_decoding_reaches() -> None:
    result = made_up({("plain", "static", 1): 10, ("none", "compiled", 1): 40}, device="cuda:0")
    # 40 steps a second of 1,000 bytes each, of 50,000 bytes a second.
    lines = "\n".join(engines_tables.remarks(result))
    assert "None compiled reaches 80.0% of that limit" in lines and "Plain static reaches 20.0%" in lines


def test_the_batch_at_which_drafting_stops_paying() -> None:
    speeds = {("plain", "eager", batch): 10.0 * batch for batch in (1, 4, 16, 64)}
    gains = {1: 2.0, 4: 1.2, 16: 0.9, 64: 0.5}
    result = made_up(speeds | {("fixed", "eager", batch): 10 * batch * gain for batch, gain in gains.items()})
    assert engine_speed.break_even(result, "eager") == 16
    faster = made_up(speeds | {("fixed", "eager", batch): 20.0 * batch for batch in gains})
    assert engine_speed.break_even(faster, "eager") is None


def test_rows_that_wait_are_told_apart() -> None:
    rounds = {"drafted": [[2, 2], [1, 0]], "accepted": [[2, 0], [0, 0]], "new_tokens": [[3, 1], [0, 1]],
              "overlap": [[2.0, 0.5], [0.0, 0.0]]}  # fmt: skip
    run = {"batch": 2, "rounds": rounds}
    assert engine_speed.waiting([run]) == 0.25
    first, second = engine_speed.by_row([run])
    assert [item["new_tokens"] for item in first["rounds"]] == [3]
    assert [item["new_tokens"] for item in second["rounds"]] == [1, 1]


def test_bytes_that_a_step_reads(pair: LoadedPair) -> None:
    target = pair.target
    config = target.config
    total = sum(p.numel() for p in target.parameters()) - config.vocab_size * config.hidden_size
    assert not config.tie_word_embeddings
    assert bandwidth.weight_bytes(target) == 8 * total
    assert bandwidth.cache_bytes(target, 10) == 8 * 10 * 2 * config.num_hidden_layers * config.hidden_size
    assert bandwidth.copy_rate(torch.device("cpu"), 2**16) > 0


def test_prepared_steps_are_timed_for_their_own_batch_size(
    settings: Settings, pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What would be compiled runs as it is, which takes no minute.
    monkeypatch.setattr(cuda_graphs, "prepare", lambda step, device, *, compile: step)
    lengths = cycle((0, 4))
    monkeypatch.setattr(AutoLength, "_choose", lambda self: setattr(self, "limit", next(lengths)))
    asked = replace(settings, engines=("compiled",), lookaheads=(2, 3))
    prompts = benchmark_prompts(pair, (30,), 2, 12)
    assert prepared_times(pair, True, 2) is None
    with keeping_engines(9):
        methods = [method for method in contestants(asked, pair) if method.facts["kind"] in ("none", "fixed", "auto")]
        runs = [run_batch(pair, method, prompts, asked) for method in methods if method.options.get("compile")]
        times = prepared_times(pair, True, 2)
        assert prepared_times(pair, True, 1) is None and prepared_times(pair, False, 2) is None
    assert len(runs) == 4 and all(run.tokens == runs[0].tokens for run in runs)
    assert times is not None
    # Those of auto are 1, at first, and then 0 and 4.
    assert (set(times["draft"]), set(times["target"])) == ({"1", "2", "3", "4"}, {"1", "2", "3", "4", "5"})
