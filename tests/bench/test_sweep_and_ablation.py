"""The tasks `sweep` and `ablation`: their grids, and each number recomputed from the JSON by a few lines here."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pytest
from helpers.tiny_pair import save_pair

from hf_specdec.bench.figures.quality import quality
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.reports.heading import heading
from hf_specdec.bench.reports.tables import ablation as ablation_tables
from hf_specdec.bench.reports.tables import sweep as sweep_tables
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_call import run_once
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks.ablation import run_ablation
from hf_specdec.bench.tasks.sweep import drafts_of, run_sweep
from hf_specdec.models.better_transformer import attention_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def dataset(models: tuple[Path, Path]) -> Path:
    """Three short questions, so that runs are short too."""
    path = models[0].parent / "three.jsonl"
    rows = [{"q": f"How much is {n} and {n}?", "a": str(2 * n)} for n in (2, 3, 4)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def settings_for(models: tuple[Path, Path], dataset: Path, task: str, **more: Any) -> Settings:
    target, draft = models
    return Settings(
        task=task, model_name=str(target), assistant_model=str(draft), assisted_generation=True, max_new_tokens=9,
        dataset=str(dataset), prompt_column="q", reference_column="a", repeats=2, output_dir=target.parent / task,
        **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def swept(models: tuple[Path, Path], dataset: Path) -> tuple[Path, dict[str, Any]]:
    grid = {"lookaheads": (1, 3), "fallback_thresholds": (0.0, 0.1), "rollback_thresholds": (0.0, 3.0)}
    drafts = tuple(map(str, (models[1], models[0])))
    settings = settings_for(models, dataset, "sweep", draft_models=drafts, **grid)
    run_sweep(settings, Processes())
    path = settings.output_dir / "sweep-three.jsonl-greedy.json"
    return path, json.loads(path.read_text())


@pytest.fixture(scope="module")
def ablated(models: tuple[Path, Path], dataset: Path) -> dict[str, Any]:
    settings = settings_for(models, dataset, "ablation")
    run_ablation(settings, Processes())
    return json.loads((settings.output_dir / "ablation-three.jsonl-greedy.json").read_text())


def rows_of(table: str) -> list[dict[str, str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(lines[0], row, strict=True)) for row in lines[2:]]


def per_repeat(result: dict[str, Any], name: str) -> list[list[dict[str, Any]]]:
    return [[r for r in result["runs"] if (r["method"], r["repeat"]) == (name, k)] for k in range(2)]


def rate(runs: list[dict[str, Any]], only: set[int] | None = None) -> float:
    """Tokens/s after the first delivery, of runs that have any there."""
    tokens, seconds = 0, 0.0
    for run in runs:
        first = run["rounds"][0]["new_tokens"] if run["rounds"] else 1
        if len(run["tokens"]) > first and (only is None or run["prompt"] in only):
            tokens, seconds = tokens + len(run["tokens"]) - first, seconds + run["seconds"] - run["puts"][0][0]
    return tokens / seconds


def speedups(result: dict[str, Any], name: str, base: str) -> list[float]:
    ratios = []
    for ours, theirs in zip(per_repeat(result, name), per_repeat(result, base), strict=True):
        both = {r["prompt"] for r in ours if not r["rounds"] or len(r["tokens"]) > r["rounds"][0]["new_tokens"]}
        both &= {r["prompt"] for r in theirs if not r["rounds"] or len(r["tokens"]) > r["rounds"][0]["new_tokens"]}
        ratios.append(rate(ours, both) / rate(theirs, both))
    return ratios


def check(shown: str, values: list[float], digits: int) -> None:
    """Mean and standard deviation, to the digits shown."""
    middle, spread = (float(part) for part in shown.split(" ± "))
    assert middle == pytest.approx(mean(values), abs=0.6 * 10**-digits)
    assert spread == pytest.approx(stdev(values), abs=0.6 * 10**-digits)


def test_every_number_of_the_sweep(swept: tuple[Path, dict[str, Any]]) -> None:
    _, result = swept
    methods = {method["name"]: method for method in result["methods"]}
    assert len(methods) == 1 + 4 + 16
    drafts, thresholds = rows_of(sweep_tables.draft_table(result)), rows_of(sweep_tables.threshold_table(result))
    assert len(drafts) == 1 + 4 and len(thresholds) == 1 + 4 + 16
    check(drafts[0]["Tokens/Sec"], [rate(runs) for runs in per_repeat(result, "plain")], 1)
    named = [*zip(list(methods)[1:5], drafts[1:], strict=True), *zip(list(methods)[1:], thresholds[1:], strict=True)]
    for name, row in named:
        method = methods[name]
        assert row["Draft"].startswith(method["draft"]) and row["n_lookahead"] == str(method["lookahead"])
        assert row.get("Fallback", "–") in ("–", f"{method.get('fallback', 0):g}")
        repeats = per_repeat(result, name)
        rounds = [[item for run in runs for item in run["rounds"]] for runs in repeats]
        check(row["Mean acceptance rate"], [total(r, "accepted") / total(r, "drafted") for r in rounds], 3)
        check(row["Speedup"], speedups(result, name, "plain"), 2)
        check(row["Tokens/Sec"], [rate(runs) for runs in repeats], 1)
        flat = [item for part in rounds for item in part]
        assert row["Tokens/Round"] == f"{total(flat, 'new_tokens') / len(flat):.2f}"
        reached = sum(min(item["accepted"] + 1, item["drafted"]) for item in flat)
        alpha = total(flat, "overlap") / reached
        assert row["α"] == f"{alpha:.3f}"
        same = sum(name not in prompt["divergences"] for prompt in result["prompts"])
        assert row["Outputs as plain"] == f"{same} of 3"
        if "Predicted speedup" in row:
            gamma = method["lookahead"]
            times = [item["times"] for item in result["forwards"] if item["draft"] == method["draft"]]
            steps = [median(one["target"]["1"]) for one in times]
            ratios = [median(one["draft_step"]) / step for one, step in zip(times, steps, strict=True)]
            check(row["Inference speed ratio (c)"], ratios, 3)
            v = mean(median(one["target"][str(gamma + 1)]) / step for one, step in zip(times, steps, strict=True))
            predicted = sum(alpha**k for k in range(gamma + 1)) / (gamma * mean(ratios) + v)
            assert float(row["Predicted speedup"]) == pytest.approx(predicted, abs=0.006)
        else:
            measured = qualities(result, name)
            shown = [row[column] for column in ("BLEU", "ROUGE-L", "Exact match")]
            assert shown == [f"{measured[key]:.1f}" for key in ("bleu", "rougeL", "exact_match")]
            assert row["Won"] == ("–" if method["strategy"] == "speculative" else f"{wins(result, name)} of 1")


def qualities(result: dict[str, Any], name: str) -> dict[str, float]:
    """From the texts of the first repeat."""
    texts = {r["prompt"]: r["text"] for r in result["runs"] if (r["method"], r["repeat"]) == (name, 0)}
    return quality([texts[p["index"]] for p in result["prompts"]], [p["references"] for p in result["prompts"]])


def wins(result: dict[str, Any], name: str) -> int:
    """On the one subtask: 1, if faster than the fastest speculative row in both repeats, and no worse than plain."""
    rated = {
        m["name"]: mean(speedups(result, m["name"], "plain"))
        for m in result["methods"]
        if m.get("strategy") == "speculative"
    }
    base = max(rated, key=lambda row: rated[row])
    ours, plain = qualities(result, name), qualities(result, "plain")
    as_good = all(ours[key] >= plain[key] - 1e-6 for key in ("rougeL", "exact_match"))
    return int(min(speedups(result, name, base)) > 1 and as_good)


def total(rounds: list[dict[str, Any]], key: str) -> float:
    return sum(item[key] for item in rounds)


def test_best_rows_and_their_commands(swept: tuple[Path, dict[str, Any]], models: tuple[Path, Path]) -> None:
    _, result = swept
    lines = sweep_tables.recommendations(result)
    for strategy, line in zip(("speculative", "bild"), lines, strict=False):
        rated = {
            method["name"]: mean(speedups(result, method["name"], "plain"))
            for method in result["methods"]
            if method.get("strategy") == strategy
        }
        best = next(m for m in result["methods"] if m["name"] == max(rated, key=lambda name: rated[name]))
        assert best["title"] in line and f"{rated[best['name']]:.2f} times plain" in line
        words = shlex.split(line.split("`")[1])
        assert words[words.index("--assistant_model") + 1] == best["draft"]
        assert words[words.index("--num_assistant_tokens") + 1] == str(best["lookahead"])
        assert ("--fallback_threshold" in words) == (strategy == "bild")
    assert lines[2].startswith("Fastest bild with ROUGE-L and exact match no lower")
    counts = {m["name"]: wins(result, m["name"]) for m in result["methods"] if m.get("strategy") == "bild"}
    chosen = sweep_tables.chosen_row(result)
    assert counts[chosen["name"]] == max(counts.values())
    assert chosen["title"] in lines[3] and f"on {max(counts.values())} of 1, chosen on these examples" in lines[3]


def test_thresholds_chosen_on_the_training_split_come_with_the_command_that_judges_them(
    swept: tuple[Path, dict[str, Any]],
) -> None:
    _, result = swept
    trained = result | {"arguments": result["arguments"] | {"dataset": "embedded"}, "split": "train"}
    line = sweep_tables.recommendations(trained)[3]
    chosen = sweep_tables.chosen_row(trained)
    rated = {
        m["name"]: mean(speedups(result, m["name"], "plain")) for m in sweep_tables.methods_of(result, "speculative")
    }
    best = next(m for m in result["methods"] if m["name"] == max(rated, key=lambda name: rated[name]))
    other = (best["draft"], best["lookahead"]) != (chosen["draft"], chosen["lookahead"])
    assert (f"was fastest with {best['draft']}, lookahead {best['lookahead']})" in line) == other
    words = shlex.split(line.split("`")[1])
    assert "chosen on the split train" in line
    assert words[words.index("--task") + 1] == "subtasks" and "--split" not in words, "heldout by default"
    assert float(words[words.index("--fallback_threshold") + 1]) == chosen["fallback"]
    assert float(words[words.index("--rollback_threshold") + 1]) == chosen["rollback"]


def test_the_heading_names_all_drafts_and_lookaheads(swept: tuple[Path, dict[str, Any]]) -> None:
    _, result = swept
    lookaheads, drafts = (
        list(dict.fromkeys(str(m[key]) for m in result["methods"] if key in m)) for key in ("lookahead", "draft")
    )
    text = heading(result)
    assert len(lookaheads) > 1 and f", lookahead {', '.join(lookaheads)}, " in text
    assert len(drafts) > 1 and f"- draft: {drafts[0]} " in text and f"\n- further drafts: {drafts[1]}\n" in text


def test_commands_name_the_precision_and_place_of_their_row(swept: tuple[Path, dict[str, Any]]) -> None:
    _, result = swept
    elsewhere = {"draft_precision": "int8", "draft_device": "cpu", "device_map": "auto", "better_transformer": True}
    row = sweep_tables.chosen_row(result)
    words = shlex.split(sweep_tables.command(result | {"arguments": result["arguments"] | elsewhere}, row))
    assert words[words.index("--draft_precision") + 1] == "int8" and words[words.index("--draft_device") + 1] == "cpu"
    assert words[words.index("--device_map") + 1] == "auto" and "--better_transformer" in words
    plain = shlex.split(sweep_tables.command(result, row))
    assert not {"--precision", "--device", "--device_map", "--dtype", "--better_transformer"} & set(plain)


def test_lossless_rows_are_lossless(swept: tuple[Path, dict[str, Any]]) -> None:
    _, result = swept
    differing = {name for prompt in result["prompts"] for name in prompt["divergences"]}
    assert all(name.startswith("bild") and name.endswith("/3.0") for name in differing)


def test_sweep_renders_again(swept: tuple[Path, dict[str, Any]]) -> None:
    path, result = swept
    assert path.with_suffix(".md").read_text() == rendering.render(result)


def test_drafts_without_being_named(models: tuple[Path, Path]) -> None:
    assert drafts_of(Settings(model_name="target")) == ("draft", "draft-small", "draft-large")
    assert drafts_of(Settings(model_name="opt-6.7b")) == ("facebook/opt-125m",)
    assert drafts_of(Settings(model_name="x", assistant_model="y")) == ("y",)
    assert drafts_of(Settings(model_name="x", draft_models=("opt-350m",))) == ("facebook/opt-350m",)
    with pytest.raises(BenchError, match="--draft_models: not given"):
        drafts_of(Settings(model_name="nobody/knows"))


def test_every_number_of_the_ablation(ablated: dict[str, Any]) -> None:
    rows = rows_of(ablation_tables.ablation_table(ablated))
    switches = ("Speculative decoding", "KV cache", "Better Transformer")
    assert len({tuple(row[switch] for switch in switches) for row in rows}) == 8
    names = {tuple(row[s] for s in switches): m["name"] for row, m in zip(rows, ablated["methods"], strict=True)}
    for row in rows:
        key = tuple(row[switch] for switch in switches)
        name = names[key]
        assert ("speculative" in name, "no cache" not in name, "better" in name) == tuple(v == "yes" for v in key)
        repeats = per_repeat(ablated, name)
        check(row["Tokens/Sec"], [rate(runs) for runs in repeats], 1)
        check(row["Speedup over none of them"], speedups(ablated, name, names["no", "no", "no"]), 2)
        ends = [sum(len(r["tokens"]) for r in runs) / sum(r["seconds"] for r in runs) for runs in repeats]
        check(row["Tokens/Sec (end to end)"], ends, 1)
        assert row["Outputs as the first"] == "3 of 3"
        if key[0] == "yes":
            check(row["Speedup of speculation"], speedups(ablated, name, names["no", key[1], key[2]]), 2)
            rounds = [item for runs in repeats for run in runs for item in run["rounds"]]
            assert row["Acceptance"] == f"{100 * total(rounds, 'accepted') / total(rounds, 'drafted'):.1f}%"
            assert row["Tokens/Round"] == f"{total(rounds, 'new_tokens') / len(rounds):.2f}"


def test_rows_really_differ_in_attention_and_cache(models: tuple[Path, Path], dataset: Path) -> None:
    from hf_specdec.bench.tasks import ablation

    settings = settings_for(models, dataset, "ablation")
    pair = load_pair(settings)
    for better in (False, True):
        method = ablation._row(settings, pair, better=better, cache=False, speculative=True)
        run_once(pair, method, Prompt(0, "x", tuple(range(5, 25))), settings)
        assert {attention_of(model) for model in pair.models} == {"sdpa" if better else "eager"}
        assert method.options["use_cache"] is False


def test_models_without_better_transformer_are_refused(
    models: tuple[Path, Path], dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_specdec.bench.models.loading.better_transformer_refusal", lambda model: "this one can't")
    with pytest.raises(BenchError, match="--better_transformer: this one can't"):
        run_ablation(settings_for(models, dataset, "ablation"), Processes())
