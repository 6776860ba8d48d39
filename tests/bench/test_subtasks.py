"""The task `subtasks`: its lines and tables, each number recomputed from the JSON by a few lines of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from helpers.tiny_pair import CONTEXT, save_pair

from hf_specdec import embedded
from hf_specdec.bench.figures.quality import quality
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.reports import rendering
from hf_specdec.bench.reports.tables import subtasks as subtasks_tables
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.tasks.subtasks import run_subtasks

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


def repeats_of(result: dict[str, Any], method: str, label: str | None) -> list[dict[int, dict[str, Any]]]:
    """The runs of each repeat."""
    wanted = {prompt["index"] for prompt in result["prompts"] if label in (None, prompt["label"])}
    return [
        {r["prompt"]: r for r in result["runs"] if (r["method"], r["repeat"]) == (method, k) and r["prompt"] in wanted}
        for k in range(3)
    ]


def ratios(result: dict[str, Any], method: str, base: str, label: str | None, macro: bool = False) -> list[float]:
    """One a repeat."""
    sides = (repeats_of(result, name, label) for name in (method, base))
    return [ratio(ours, theirs, macro) for ours, theirs in zip(*sides, strict=True)]


def ratio(runs: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]], macro: bool = False) -> float:
    both = [index for index in runs if after(runs[index])[0] > 0 and after(base[index])[0] > 0]
    if macro:
        ours, theirs = (mean(rate([found[index]]) for index in both) for found in (runs, base))
        return ours / theirs
    return rate([runs[index] for index in both]) / rate([base[index] for index in both])


LABELS = [None, *embedded.SUBTASKS]


@pytest.mark.parametrize("label", LABELS)
def test_every_number_of_a_subtask(result: dict[str, Any], label: str | None) -> None:
    header, _, *rows = cells(subtasks_tables.group_table(result, label))
    assert len(rows) == len(NAMES)
    base = chosen(result, "plain", label)
    forwards = forwards_of(result)
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
        micro, macro = (median(ratios(result, name, "plain", label, macro=way)) for way in (False, True))
        assert float(shown["Speedup (micro)"].split()[0]) == pytest.approx(micro, abs=0.006)
        assert float(shown["Speedup (macro)"]) == pytest.approx(macro, abs=0.006)
        assert float(shown["η"]) == pytest.approx(efficiency(runs, forwards), abs=0.006)
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


def forwards_of(result: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Of each prompt the medians of its subtask's raw forwards: "draft", and by width."""
    found = {}
    for prompt in result["prompts"]:
        mine = [item["times"] for item in result["forwards"] if item["label"] == prompt["label"]]
        assert len(mine) == 3
        medians = {"draft": median(seconds for times in mine for seconds in times["draft_step"])}
        for width in range(1, 12):
            medians[str(width)] = median(seconds for times in mine for seconds in times["target"][str(width)])
        found[prompt["index"]] = medians
    return found


def efficiency(runs: dict[int, dict[str, Any]], forwards: dict[int, dict[str, float]]) -> float:
    needed = measured = 0.0
    for index, run in runs.items():
        tokens, seconds = after(run)
        if tokens == 0:
            continue
        measured += seconds
        if run["rounds"] is None:
            needed += tokens * forwards[index]["1"]
        for item in (run["rounds"] or ())[1:]:
            needed += item["draft_steps"] * forwards[index]["draft"] + forwards[index][str(item["width"])]
    return needed / measured


def check_range(cell: str, values: list[float]) -> None:
    """The median, inside its range."""
    value, within = cell.split(" ")
    low, high = (float(part) for part in within.strip("()").split("–"))
    assert (float(value), low, high) == pytest.approx((median(values), min(values), max(values)), abs=0.006)
    assert low <= float(value) <= high


def test_speedups_by_subtask_and_their_range(result: dict[str, Any]) -> None:
    _, _, *rows = cells(subtasks_tables.speedup_table(result))
    assert [row[0] for row in rows] == [*embedded.SUBTASKS, "overall"]
    for label, row in zip([*embedded.SUBTASKS, None], rows, strict=True):
        base = chosen(result, "plain", label)
        assert int(row[1]) == len(base)
        assert float(row[2]) == pytest.approx(rate(list(base.values())), abs=0.06)
        for name, cell in zip(NAMES[1:], row[3:], strict=True):
            check_range(cell, ratios(result, name, "plain", label))


def test_where_the_time_goes(result: dict[str, Any]) -> None:
    header, _, *rows = cells(subtasks_tables.time_table(result))
    named = [(label, name) for label in [*embedded.SUBTASKS, None] for name in ("speculative", "bild")]
    shown = {(row[0], row[1].split()[0]): dict(zip(header, row, strict=True)) for row in rows}
    for label, name in named:
        rounds = [item for run in chosen(result, name, label).values() for item in run["rounds"][1:]]
        row = shown.get((label or "overall", "BiLD" if name == "bild" else "Speculative"))
        if not rounds:
            assert row is None
            continue
        draft, verify, whole = (
            1000 * mean(item[key] for item in rounds) for key in ("draft_seconds", "verify_seconds", "seconds")
        )
        assert float(row["Draft (ms/round)"]) == pytest.approx(draft, abs=0.006)
        assert float(row["Verification (ms/round)"]) == pytest.approx(verify, abs=0.006)
        assert float(row["Overhead (ms/round)"]) == pytest.approx(whole - draft - verify, abs=0.006)
        assert float(row["Overhead share"].strip("%")) == pytest.approx(100 * (1 - (draft + verify) / whole), abs=0.06)
        assert float(row["Draft steps/Round"]) == pytest.approx(mean(r["draft_steps"] for r in rounds), abs=0.006)


def judged(result: dict[str, Any], label: str | None) -> tuple[list[float], float, float]:
    """BiLD over speculative decoding a repeat, and what it changes in ROUGE-L and exact match."""
    prompts = [prompt for prompt in result["prompts"] if label in (None, prompt["label"])]
    scores = []
    for name in ("plain", "bild"):
        texts = {r["prompt"]: r["text"] for r in result["runs"] if (r["method"], r["repeat"]) == (name, 0)}
        scores.append(quality([texts[p["index"]] for p in prompts], [p["references"] for p in prompts]))
    rouge, exact = (scores[1][key] - scores[0][key] for key in ("rougeL", "exact_match"))
    return ratios(result, "bild", "speculative", label), rouge, exact


def test_bild_against_speculative_decoding(result: dict[str, Any]) -> None:
    _, _, *rows = cells(subtasks_tables.bild_table(result))
    count = 0
    for label, row in zip([*embedded.SUBTASKS, None], rows, strict=True):
        speeds, rouge, exact = judged(result, label)
        assert row[0] == (label or "overall") and int(row[1]) == len(chosen(result, "bild", label))
        check_range(row[2], speeds)
        assert (float(row[3]), float(row[4])) == pytest.approx((rouge, exact), abs=0.06)
        yes = min(speeds) > 1 and rouge >= -1e-6 and exact >= -1e-6
        assert (row[5] == "yes") == yes
        count += yes and label is not None
    line = "BiLD (fallback 0.1, rollback 3) is faster than speculative decoding at no loss of quality on"
    assert f"{line} {count} of 8 subtasks." in subtasks_tables.render(result)


def test_verdicts_are_no_easier_than_they_say(result: dict[str, Any]) -> None:
    """A BiLD that is faster wins; not with a worse answer, nor with one slow repeat, nor without references."""
    fast = json.loads(json.dumps(result))
    for run in fast["runs"]:
        if run["method"] == "bild":
            run["seconds"], run["puts"][0][0] = 1e-6 * (1 + len(run["tokens"])), 1e-6
    for entry in fast["quality"]:
        entry |= {"rougeL": 50.0, "exact_match": 50.0}
    assert "on 8 of 8 subtasks" in subtasks_tables.count_line(fast)
    worse = json.loads(json.dumps(fast))
    next(e for e in worse["quality"] if (e["method"], e["subtask"]) == ("bild", "qa"))["rougeL"] = 49.9
    assert "on 7 of 8 subtasks" in subtasks_tables.count_line(worse)
    assert cells(subtasks_tables.bild_table(worse))[2:][embedded.SUBTASKS.index("qa")][5] == "no: loses quality"
    slow = json.loads(json.dumps(fast))
    for run in slow["runs"]:
        if run["method"] == "bild" and run["repeat"] == 1:
            run["seconds"] = 1000.0
    assert "on 0 of 8 subtasks" in subtasks_tables.count_line(slow)
    assert "is not known" in subtasks_tables.count_line(fast | {"quality": []})
    unjudged = fast | {"quality": [entry for entry in fast["quality"] if entry["subtask"] != "qa"]}
    assert "on 7 of 8 subtasks; of the others 1 can't be judged" in subtasks_tables.count_line(unjudged)


def test_quality_of_each_method(result: dict[str, Any]) -> None:
    _, _, *rows = cells(subtasks_tables.quality_table(result))
    assert len(rows) == len(NAMES) * len(LABELS)
    for label in LABELS:
        for name, row in zip(NAMES, [r for r in rows if r[0] == (label or "overall")], strict=True):
            prompts = [prompt for prompt in result["prompts"] if label in (None, prompt["label"])]
            texts = {r["prompt"]: r["text"] for r in result["runs"] if (r["method"], r["repeat"]) == (name, 0)}
            expected = quality([texts[p["index"]] for p in prompts], [p["references"] for p in prompts])
            assert int(row[2]) == len(prompts)
            assert row[3:] == [f"{expected[k]:.1f}" for k in ("bleu", "rouge1", "rouge2", "rougeL", "exact_match")]


def test_terminal_lines(settings: Settings, printed: str, result: dict[str, Any]) -> None:
    assert printed == subtasks_tables.terminal(result)
    for line in (
        f"target:       {settings.model_name}", f"draft:        {settings.assistant_model}", "0 (greedy)",
        "max tokens:   9", "gamma:        3", "fallback 0.1, rollback 3",
    ):  # fmt: skip
        assert line in printed
    plain, ours = (list(chosen(result, name, None).values()) for name in ("plain", "bild"))
    speedup = median(ratios(result, "bild", "plain", None))
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
    seconds = [q for dialogue in questions.dialogues(settings) for q in dialogue if q.earlier]
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
    _, _, *rows = cells(subtasks_tables.divergence_table(result))
    assert len(rows) == 4
    for name, row in zip(NAMES[1:], rows, strict=True):
        plain, ours = ({r["prompt"]: r["tokens"] for r in result["runs"] if r["method"] == m} for m in ("plain", name))
        firsts = [
            next((k for k, (a, b) in enumerate(zip(ours[i], plain[i], strict=False), 1) if a != b), len(plain[i]) + 1)
            for i in plain
            if ours[i] != plain[i]
        ]
        assert row[1] == f"{len(firsts)} of {len(plain)}"
        margins = [p["divergences"][name]["margin"] for p in result["prompts"] if name in p["divergences"]]
        shown = [f"{mean(firsts):.1f}", f"{min(margins):.3g}", f"{max(margins):.3g}"] if firsts else ["–"] * 3
        assert row[2:] == shown


def test_outputs_of_one_token_have_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_for(tmp_path, max_new_tokens=1, limit=1, repeats=1)
    run_subtasks(settings, Processes())
    text = (settings.output_dir / "subtasks-greedy.md").read_text()
    assert "Overall Result: AS: – tokens/sec, SPS: – tokens/sec -> – X Speedup" in capsys.readouterr().out
    result = json.loads((settings.output_dir / "subtasks-greedy.json").read_text())
    _, _, *rows = cells(subtasks_tables.group_table(result, None))
    assert all(row[1:5] == ["–"] * 4 and row[-1] == "9" for row in rows) and rendering.render(result) == text
    assert {row[-1] for row in cells(subtasks_tables.bild_table(result))[2:]} == {"no rates"}
    # A column of single characters, such as η's here, still has a rule that markdown takes for one.
    rules = [cell for line in text.splitlines() if line.startswith("|:-") for cell in line.split("|")[1:-1]]
    assert rules and all(re.fullmatch(r":-+|-+:", cell) for cell in rules)


def test_encoder_decoder_pairs_in_sampling(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, encoder_decoder=True, do_sample=True, limit=1, repeats=1)
    run_subtasks(settings, Processes())
    result = json.loads((settings.output_dir / "subtasks-sampling.json").read_text())
    assert [method["name"] for method in result["methods"]] == NAMES
    assert len(result["runs"]) == 9 * 5 and all(run["tokens"] for run in result["runs"])
    text = (settings.output_dir / "subtasks-sampling.md").read_text()
    assert "Outputs that differ" not in text and subtasks_tables.DRAWN in text


def test_quality_in_sampling_is_that_of_the_same_draws_in_every_repeat(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"q": "How much is 2 and 3?", "a": "5"}\n{"q": "How much is 2 and 4?", "a": "6"}\n')
    data = {"dataset": str(questions), "prompt_column": "q", "reference_column": "a", "limit": None, "repeats": 2}
    settings = settings_for(tmp_path, do_sample=True, **data)
    run_subtasks(settings, Processes())
    result = json.loads((settings.output_dir / "subtasks-questions.jsonl-sampling.json").read_text())
    drawn = [
        {(r["method"], r["prompt"]): r["tokens"] for r in result["runs"] if r["repeat"] == repeat} for repeat in (0, 1)
    ]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 10
    assert len({tuple(tokens) for tokens in drawn[0].values()}) > 4, "methods and questions draw their own"
    assert "- sampling (temperature 1, top_k 50, top_p 1, seed 0)" in rendering.render(result)


def test_the_split_of_the_embedded_data_is_chosen_and_said(tmp_path: Path) -> None:
    train, heldout = (
        {q.turns for dialogue in questions.dialogues(Settings(task="sweep", split=split, limit=3)) for q in dialogue}
        for split in ("train", None)
    )
    assert not train & heldout
    with pytest.raises(BenchError, match="--split: 'test' is none of the embedded data set's: train, heldout"):
        questions.dialogues(Settings(task="sweep", split="test"))
    assert results.stem(Settings(task="sweep", split="train")) == "sweep-train-greedy"
    assert results.stem(Settings(task="sweep")) == "sweep-greedy"
