"""The task `subtasks`: its lines and tables, each number recomputed from the JSON by a few lines of their own."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from tiny_pair import CONTEXT, save_pair

from hf_specdec import embedded
from hf_specdec.bench import datasets, rendering
from hf_specdec.bench import subtasks_report as report
from hf_specdec.bench.loading import load_pair
from hf_specdec.bench.processes import Processes
from hf_specdec.bench.quality import quality
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.subtasks import run_subtasks

NAMES = ["plain", "speculative", "bild", "assisted", "prompt_lookup"]
Key = tuple[str, int, int]


def settings_for(folder: Path, encoder_decoder: bool = False, **more: Any) -> Settings:
    target, draft = save_pair(folder, encoder_decoder)
    return Settings(
        task="subtasks", model_name=str(target), assistant_model=str(draft), assisted_generation=True,
        num_assistant_tokens=3, fallback_threshold=0.1, output_dir=folder / "out",
        **{"max_new_tokens": 9, "limit": 1, "repeats": 3} | more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return settings_for(tmp_path_factory.mktemp("subtasks"))


@pytest.fixture(scope="module")
def printed(settings: Settings) -> str:
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("sys.stdout.write", lines.append)
        run_subtasks(settings, Processes())
    return "".join(lines)


@pytest.fixture(scope="module")
def result(settings: Settings, printed: str) -> dict[str, Any]:
    return json.loads((settings.output_dir / "subtasks-greedy.json").read_text())


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def chosen(result: dict[str, Any], method: str, label: str | None) -> dict[int, dict[str, Any]]:
    """Of three repeats of each prompt the one that took the middle time."""
    found = {}
    for prompt in result["prompts"]:
        runs = [r for r in result["runs"] if r["method"] == method and r["prompt"] == prompt["index"]]
        if label in (None, prompt["label"]):
            found[prompt["index"]] = sorted(runs, key=lambda run: run["seconds"])[1]
    return found


def after(run: dict[str, Any]) -> tuple[int, float]:
    """Tokens and seconds after the first delivery."""
    first = run["rounds"][0]["new_tokens"] if run["rounds"] else 1
    return len(run["tokens"]) - first, run["seconds"] - run["puts"][0][0]


def rate(runs: list[dict[str, Any]]) -> float:
    parts = [after(run) for run in runs if after(run)[0] > 0]
    return sum(tokens for tokens, _ in parts) / sum(seconds for _, seconds in parts)


def ratio(runs: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]], macro: bool = False) -> float:
    both = [index for index in runs if after(runs[index])[0] > 0 and after(base[index])[0] > 0]
    if macro:
        ours, theirs = (mean(rate([found[index]]) for index in both) for found in (runs, base))
        return ours / theirs
    return rate([runs[index] for index in both]) / rate([base[index] for index in both])


LABELS = [None, *embedded.SUBTASKS]


@pytest.mark.parametrize("label", LABELS)
def test_every_number_of_a_subtask(result: dict[str, Any], label: str | None) -> None:
    header, _, *rows = cells(report.group_table(result, label))
    assert len(rows) == len(NAMES)
    base = chosen(result, "plain", label)
    for name, row in zip(NAMES, rows, strict=True):
        shown = dict(zip(header, row, strict=True))
        runs = chosen(result, name, label)
        listed = list(runs.values())
        assert float(shown["Tokens/Sec (micro)"]) == pytest.approx(rate(listed), abs=0.06)
        assert float(shown["Tokens/Sec (macro)"]) == pytest.approx(
            mean(rate([run]) for run in listed if after(run)[0] > 0), abs=0.06
        )
        tokens, seconds = sum(len(run["tokens"]) for run in listed), sum(run["seconds"] for run in listed)
        assert float(shown["Tokens/Sec (end to end)"]) == pytest.approx(tokens / seconds, abs=0.06)
        assert float(shown["Speedup (micro)"].split()[0]) == pytest.approx(ratio(runs, base), abs=0.006)
        assert float(shown["Speedup (macro)"]) == pytest.approx(ratio(runs, base, macro=True), abs=0.006)
        assert int(shown["Without a rate"]) == sum(after(run)[0] == 0 for run in listed)
        rounds = [item for run in listed for item in run["rounds"] or ()]
        if name == "plain":
            assert [shown[column] for column in ("Acceptance", "Tokens/Round", "α")] == ["–"] * 3
            continue
        drafted, accepted = sum(r["drafted"] for r in rounds), sum(r["accepted"] for r in rounds)
        assert shown["Acceptance"] == (f"{100 * accepted / drafted:.1f}%" if drafted else "–")
        assert shown["Tokens/Round"] == f"{tokens / len(rounds):.2f}"
        reached = sum(min(r["accepted"] + 1, r["drafted"]) for r in rounds)
        assert shown["α"] == (f"{sum(r['overlap'] for r in rounds) / reached:.3f}" if reached else "–")
        texts = [run["tokens"] for run in listed]
        same = sum(ours == run["tokens"] for ours, run in zip(texts, base.values(), strict=True))
        assert shown["Outputs as plain"] == f"{same} of {len(base)}"


def test_speedups_by_subtask_and_their_range(result: dict[str, Any]) -> None:
    _, _, *rows = cells(report.speedup_table(result))
    assert [row[0] for row in rows] == [*embedded.SUBTASKS, "overall"]
    for label, row in zip([*embedded.SUBTASKS, None], rows, strict=True):
        base = chosen(result, "plain", label)
        assert int(row[1]) == len(base)
        assert float(row[2]) == pytest.approx(rate(list(base.values())), abs=0.06)
        for name, cell in zip(NAMES[1:], row[3:], strict=True):
            value, within = cell.split(" ")
            assert float(value) == pytest.approx(ratio(chosen(result, name, label), base), abs=0.006)
            ratios = []
            for repeat in range(3):
                one, other = (
                    {r["prompt"]: r for r in result["runs"] if (r["method"], r["repeat"]) == (m, repeat)}
                    for m in (name, "plain")
                )
                ratios.append(ratio({index: one[index] for index in base}, {index: other[index] for index in base}))
            low, high = (float(part) for part in within.strip("()").split("–"))
            assert (low, high) == pytest.approx((min(ratios), max(ratios)), abs=0.006)


def test_quality_of_each_method(result: dict[str, Any]) -> None:
    _, _, *rows = cells(report.quality_table(result))
    assert len(rows) == len(NAMES) * len(LABELS)
    for label in LABELS:
        for name, row in zip(NAMES, [r for r in rows if r[0] == (label or "overall")], strict=True):
            prompts = [prompt for prompt in result["prompts"] if label in (None, prompt["label"])]
            texts = {r["prompt"]: r["text"] for r in result["runs"] if (r["method"], r["repeat"]) == (name, 0)}
            expected = quality([texts[p["index"]] for p in prompts], [p["references"] for p in prompts])
            assert int(row[2]) == len(prompts)
            assert row[3:] == [f"{expected[k]:.1f}" for k in ("bleu", "rouge1", "rouge2", "rougeL", "exact_match")]


def test_terminal_lines(settings: Settings, printed: str, result: dict[str, Any]) -> None:
    assert printed == report.terminal(result)
    for line in (
        f"target:       {settings.model_name}", f"draft:        {settings.assistant_model}", "0 (greedy)",
        "max tokens:   9", "gamma:        3", "fallback 0.1, rollback 3",
    ):  # fmt: skip
        assert line in printed
    plain, ours = (list(chosen(result, name, None).values()) for name in ("plain", "bild"))
    speedup = ratio(chosen(result, "bild", None), chosen(result, "plain", None))
    both = f"AS: {rate(plain):.1f} tokens/sec, BiLD: {rate(ours):.1f} tokens/sec"
    assert f"Overall Result: {both} -> {speedup:.2f} X Speedup" in printed
    assert printed.count("X Speedup") == 4 * 9 and "\nlaw analytics Result: AS: " in printed
    assert "Average alpha: SPS 0." in printed


def test_the_file_renders_again_from_its_json(settings: Settings, result: dict[str, Any]) -> None:
    assert (settings.output_dir / "subtasks-greedy.md").read_text() == rendering.render(result)
    assert sorted(path.name for path in settings.output_dir.iterdir()) == ["subtasks-greedy.json", "subtasks-greedy.md"]


def test_methods_take_turns_on_each_example(result: dict[str, Any]) -> None:
    runs = sorted(result["runs"], key=lambda run: run["position"])
    assert [run["position"] for run in runs] == list(range(len(runs)))
    for start in range(0, len(runs), 5):
        block = runs[start : start + 5]
        assert len({(run["repeat"], run["prompt"]) for run in block}) == 1
        assert {run["method"] for run in block} == set(NAMES)
    assert {run["method"] for run in runs[::5]} == set(NAMES)


def test_second_turns_follow_the_models_own_first_answers(settings: Settings, result: dict[str, Any]) -> None:
    pair = load_pair(settings)
    plain = {r["prompt"]: r["text"] for r in result["runs"] if (r["method"], r["repeat"]) == ("plain", 0)}
    seconds = [q for dialogue in datasets.dialogues(settings) for q in dialogue if q.earlier]
    assert seconds
    for question in seconds:
        (earlier,) = question.earlier
        text = f"{question.turns[0]}\n{plain[earlier]}\n{question.turns[1]}"
        wanted = len(pair.tokenizer(text).input_ids)
        shown = result["prompts"][question.index]
        assert (shown["index"], shown["turn"]) == (question.index, 2)
        assert (shown["tokens"], shown["cut"]) == (min(wanted, CONTEXT - 9), max(0, wanted - (CONTEXT - 9)))


def test_prompts_that_were_cut_are_said(result: dict[str, Any], printed: str) -> None:
    cut = [prompt for prompt in result["prompts"] if prompt["cut"]]
    assert cut and all(prompt["tokens"] == CONTEXT - 9 for prompt in cut)
    assert f"{len(cut)} of {len(result['prompts'])} prompts were longer than the context and cut on the left" in printed


def test_divergences_and_their_margins(result: dict[str, Any]) -> None:
    # In float64 the lossless methods leave plain decoding nowhere; BiLD does, where its rollback lets it.
    differing = {name for prompt in result["prompts"] for name in prompt["divergences"]}
    assert differing <= {"bild"}
    _, _, *rows = cells(report.divergence_table(result))
    margins = [p["divergences"]["bild"]["margin"] for p in result["prompts"] if "bild" in p["divergences"]]
    assert rows[1][1] == f"{len(margins)} of {len(result['prompts'])}"
    assert not margins or rows[1][3:] == [f"{min(margins):.3g}", f"{max(margins):.3g}"]


def test_outputs_of_one_token_have_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_for(tmp_path, max_new_tokens=1, limit=1, repeats=1)
    run_subtasks(settings, Processes())
    text = (settings.output_dir / "subtasks-greedy.md").read_text()
    assert "Overall Result: AS: – tokens/sec, SPS: – tokens/sec -> – X Speedup" in capsys.readouterr().out
    result = json.loads((settings.output_dir / "subtasks-greedy.json").read_text())
    _, _, *rows = cells(report.group_table(result, None))
    assert all(row[1:5] == ["–"] * 4 and row[-1] == "9" for row in rows) and rendering.render(result) == text


def test_encoder_decoder_pairs_in_sampling(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, encoder_decoder=True, do_sample=True, limit=1, repeats=1)
    run_subtasks(settings, Processes())
    result = json.loads((settings.output_dir / "subtasks-sampling.json").read_text())
    assert [method["name"] for method in result["methods"]] == NAMES
    assert len(result["runs"]) == 9 * 5 and all(run["tokens"] for run in result["runs"])
    assert "Outputs that differ" not in (settings.output_dir / "subtasks-sampling.md").read_text()
