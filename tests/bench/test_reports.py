"""Reports of every task: figures follow from the calls, they render from the file alone, and READMEs quote them."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from helpers.made_up_results import METHODS, drafted_call, method, part_of, plain_call, random_calls, result_of
from matplotlib.figure import Figure

from hf_specdec.bench import environment, results
from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import Part, acceptance_rate, alpha, tokens_per_round, whole
from hf_specdec.bench.records import Asked, Call, Divergence, Interval, Method, Model, Result, Score
from hf_specdec.bench.reports import best_settings, columns, readme
from hf_specdec.bench.reports.columns import method_table
from hf_specdec.bench.reports.heading import heading, remarks, terminal
from hf_specdec.bench.reports.markdown import approximate, number, points, ratio, table
from hf_specdec.bench.reports.pictures import drawing, gains, lookahead, quality
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import ablation, benchmark, engines, run_task, subtasks, task_module

TASKS = ("benchmark", "subtasks", "sampling", "sweep", "ablation", "engines")


def rows_of(text: str) -> list[dict[str, str]]:
    """The rows of a markdown table, by column."""
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def rate(calls: list[Call]) -> float:
    """0 where all ended with the first delivery."""
    after = [(call.new_tokens - call.first_tokens, call.seconds - call.first_seconds) for call in calls]
    return sum(t for t, _ in after if t) / (sum(s for t, s in after if t) or 1.0)


def of(result: Result, name: str, batch: int | None = None) -> list[Call]:
    return [c for c in result.calls if c.method == name and batch in (None, len(c.prompts))]


def timed_in_both(one: list[Call], other: list[Call]) -> list[Call]:
    """The calls of the first list whose counterpart in the second has a rate, too."""
    timed = {(c.prompts, c.repeat) for c in other if c.new_tokens > c.first_tokens}
    return [c for c in one if (c.prompts, c.repeat) in timed]


def first(cell: str) -> float:
    return float(cell.split()[0])


def test_a_file_renders_as_when_it_was_measured(results_folder: Path) -> None:
    for path in results_folder.glob(f"*{results.SUFFIX}"):
        result, stem = results.load(path), path.name.removesuffix(results.SUFFIX)
        text, pictures = results.document(result, stem, task_module(result.settings.task).render)
        assert text == path.with_name(f"{stem}.md").read_text()
        assert pictures.keys() == {one.name for one in path.parent.glob(f"{stem}-*.png")}
        assert re.findall(r"!\[.*\]\((.*)\)", text) == list(pictures), "a report embeds what is drawn, once"


def test_a_result_is_the_same_bytes_each_time_and_is_read_back(results: dict[str, Result]) -> None:
    from hf_specdec.bench.results import from_bytes, to_bytes

    for result in results.values():
        assert from_bytes(to_bytes(result)) == result and to_bytes(from_bytes(to_bytes(result))) == to_bytes(result)


@pytest.mark.parametrize(("task", "batch"), [("benchmark", None), ("subtasks", None), ("engines", 1), ("engines", 2)])
def test_rates_and_speedups_follow_from_the_calls(results: dict[str, Result], task: str, batch: int | None) -> None:
    result = results[task]
    part = whole(result).where(batch=batch)
    rates = {one.name: rate(of(result, one.name, batch)) for one in part.methods}
    assisted = [one.name for one in part.methods if one.kind == "assisted"]
    fastest = max(assisted, key=lambda name: rates[name], default=None)
    rows = rows_of(method_table({"": part}, columns.speed_columns(result)))
    for one, row in zip(part.methods, rows, strict=True):
        if not rates[one.name]:  # "auto" may draft all in its first round
            assert row["Tokens/Sec"] == "–"
            continue
        assert float(row["Tokens/Sec"]) == pytest.approx(rates[one.name], abs=0.06)
        questions = {tuple(result.prompts[i].question for i in c.prompts) for c in of(result, one.name, batch)}
        assert int(row["n"]) == len(questions)
        bases = {"plain generate()": "plain", "plain on the same engine": one.same_engine,
                 "transformers' assisted generation": fastest}  # fmt: skip
        for words, base in bases.items():
            cell = row[f"Speedup over {words}"]
            if base in (None, one.name):
                assert cell == "–"
                continue
            ours, theirs = (of(result, name, batch) for name in (one.name, str(base)))
            expected = rate(timed_in_both(ours, theirs)) / rate(timed_in_both(theirs, ours))
            assert first(cell) == pytest.approx(expected, abs=0.006)
            assert ("(" in cell) == (len(questions) >= 6), "no interval below six examples"
        whole_calls = of(result, one.name, batch)
        ends = sum(call.new_tokens for call in whole_calls) / sum(call.seconds for call in whole_calls)
        assert float(row["Tokens/Sec, end to end"]) == pytest.approx(ends, abs=0.06)


def test_every_task_has_the_rows_of_all_baselines(results: dict[str, Result]) -> None:
    for task in TASKS:
        assert {"plain", "none", "assisted", "speculative"} <= {one.kind for one in results[task].methods}, task


def test_rounds_are_told_by_prompt_length(results: dict[str, Result]) -> None:
    part = whole(results["benchmark"])
    groups = benchmark.by_length(part)
    assert list(groups) == ["20", "30", "all"]
    rows = rows_of(method_table(groups, columns.ROUNDS, group="Prompt length", methods=columns.drafted))
    assert len(rows) == 3 * 3
    titles = {one.title.lower(): one.name for one in part.methods}
    for row in rows:
        calls = groups[row["Prompt length"]].of(titles[row["Method"].lower()])
        assert row["Acceptance"] == f"{100 * (acceptance_rate(calls) or 0):.1f}%"
        assert float(row["Tokens/Round"]) == pytest.approx(tokens_per_round(calls), abs=0.006)
        assert float(row["α"]) == pytest.approx(alpha(calls), abs=0.0006)


def test_example_rows_are_real_calls(results: dict[str, Result]) -> None:
    result = results["benchmark"]
    for name in ("plain", "speculative"):
        *rows, last = rows_of(benchmark.example_table(whole(result), result.method(name)))
        assert [row["Example#"] for row in rows] == [str(n) for n in range(1, 11)] and last["Example#"] == "all"
        assert ("Acceptance" in last) == (name == "speculative")
        shown = []
        for place, row in enumerate(rows):
            # Of two repeats the faster one, which is the lower of the middle two.
            call = min((c for c in of(result, name) if c.prompts == (place,)), key=lambda call: call.seconds)
            shown.append(call)
            assert float(row["Total Time (s)"]) == pytest.approx(call.seconds, abs=6e-4)
            assert float(row["Prefill Phase (ms)"]) == pytest.approx(1000 * call.first_seconds, abs=6e-3)
            assert float(row["Tokens/Sec"]) == pytest.approx(rate([call]), abs=0.06)
        assert float(last["Tokens/Sec"]) == pytest.approx(rate(shown), abs=0.06)
        assert float(last["Prefill Phase (ms)"]) == pytest.approx(1000 * mean(c.first_seconds for c in shown), abs=6e-3)


def test_outputs_that_differ_are_counted_and_placed(results: dict[str, Result]) -> None:
    result = results["benchmark"]
    ours = result.method("speculative")
    assert columns.equal_outputs(whole(result), ours) == "10 of 10"
    calls = [
        replace(call, outputs=("other",)) if call.method == "speculative" and call.prompts == (2,) else call
        for call in result.calls
    ]
    prompts = [replace(o, divergences={"speculative": Divergence(4)}) if o.index == 2 else o for o in result.prompts]
    said = benchmark.conclusions(whole(replace(result, calls=calls, prompts=prompts)))
    assert any("9 of 10 equal to plain generate(); first differences: example 3 at token 5" in line for line in said)
    assert columns.equal_outputs(whole(results["sampling"]), ours) == "–", "drawn"
    drafting = next(one for one in results["engines"].methods if one.kind == "speculative")
    assert columns.equal_outputs(whole(results["engines"]).where(batch=3), drafting) == "3 of 3", "row by row"


def test_the_ablation_names_both_baselines_of_a_row(results: dict[str, Result]) -> None:
    result = results["ablation"]
    seen = 0
    for one, row in zip(result.methods, rows_of(ablation.ablation_table(whole(result))), strict=True):
        assert [row["KV cache"], row["Better Transformer"]] == [
            "yes" if switch else "no" for switch in (one.cache, one.better_transformer)
        ]
        if one.same_engine is not None:
            expected = rate(of(result, one.name)) / rate(of(result, one.same_engine))
            assert first(row["Speedup over plain on the same engine"]) == pytest.approx(expected, abs=0.006)
            seen += 1
    assert seen == 4


@pytest.mark.parametrize(("factor", "words"), [(2.0, "is faster than plain"), (0.5, "is slower than plain")])
def test_engines_say_where_drafting_is_faster_by_the_interval(factor: float, words: str) -> None:
    calls = []
    for prompt in range(8):
        calls += [plain_call(prompt, method="none recorded"), drafted_call([(1, 1)] * 6, prompt=prompt)]
    calls = [replace(c, seconds=2.0 / (factor if c.method == "speculative" else 1)) for c in calls]
    calls = [replace(c, first_seconds=0.1 * c.seconds, first_tokens=1, new_tokens=11) for c in calls]
    said = "\n".join(engines.conclusions(part_of(calls, METHODS)))
    assert f"{words} decoding at batch size 1 ({factor:.2f}" in said
    few = "\n".join(engines.conclusions(part_of([c for c in calls if c.prompts[0] < 5], METHODS)))
    assert "was measured on too few examples for an interval" in few


def test_engines_say_what_could_not_be_measured() -> None:
    compiled = method("none compiled", "none", engine="compiled")
    calls = [plain_call(tokens=1), plain_call(method="none compiled")]
    said = "\n".join(engines.conclusions(part_of(calls, [method("plain"), compiled])))
    assert "Nothing was compiled at batch size 1" in said
    assert "Plain at batch size 1: no tokens after the first delivery" in said


def test_remarks_say_what_makes_times_untrustworthy() -> None:
    def said(calls: list[Call], **more: Any) -> str:
        return terminal(remarks(whole(result_of(calls, [method("plain")], **more))))

    calm = [plain_call(repeat=repeat) for repeat in range(2)]
    assert "Remarks" not in said(calm)
    assert "Times are unsteady" in said([*calm, plain_call(repeat=2, step=0.3)])
    assert "rests on a single run" in said(calm[:1])
    for cores in (0.5, 0.51):
        result = result_of(calm, [method("plain")])
        result.environment = replace(result.environment, busy_cores=cores)
        assert ("kept 0.51 cores busy" in terminal(remarks(whole(result)))) == (cores > 0.5)


def test_the_heading_describes_the_run(results: dict[str, Result]) -> None:
    assert "lookahead 1, 2, 3, auto" in heading(whole(results["sweep"]))
    assert "sampling (temperature 1" in heading(whole(results["sampling"]))
    text = heading(whole(results["engines"]))
    assert "batch size 1, 2, 3" in text
    assert "- prompts: 3 of 20 tokens at batch size 1, 3; 2 of 20 tokens at batch size 2" in text.splitlines()


def test_speedups_over_a_quantized_baseline_are_named_so() -> None:
    calls, _ = random_calls(1)
    result = result_of(calls, METHODS)
    result.models["target"] = Model("big", "Llama", 100, "int8 weights, float32", "cpu", "sdpa")
    text = method_table({"": whole(result)}, columns.speed_columns(result))
    assert "Speedup over plain generate() in int8" in text and "Speedup over plain on the same engine" in text
    assert "as quantized by optimum-quanto" in terminal(remarks(whole(result)))


def test_how_figures_are_written() -> None:
    assert ratio(Interval(1.234, 1.0, 1.5)) == "1.23 (1.00–1.50)"
    assert ratio(Interval(1.234)) == "1.23" and ratio(None) == "–"
    assert points(Interval(-0.31, -1.0, 0.25)) == "-0.3 (-1.0 to +0.2)"
    assert (approximate(1267.0), approximate(None), number(None, 2)) == ("1,300", "–", "–")
    lines = table([{"a": "1", "b": "x", "c": "1.0"}, {"a": "2", "b": "y|z", "c": "–"}]).splitlines()
    assert re.fullmatch(r"\|:-+\|:-+\|-+:\|", lines[1]) and "y\\|z" in lines[3]


def swept() -> Part:
    """Speculative decoding at three lookaheads, and BiLD, which is faster and never worse."""
    keywords = [{"num_assistant_tokens": n} for n in (2, 4, 8)]
    rows = [
        Method(f"s{n['num_assistant_tokens']}", "speculative decoding", "speculative", "recorded",
               n["num_assistant_tokens"], "none recorded", "small", 10, n)
        for n in keywords
    ]  # fmt: skip
    bild = {"generation_strategy": "bild", "fallback_threshold": 0.6, "rollback_threshold": 3.0}
    rows.append(
        Method("b", "BiLD (fallback 0.6, rollback 3)", "bild", "recorded", 4, "none recorded", "small", 10, bild)
    )
    calls = []
    for prompt in range(8):
        calls += [plain_call(prompt), plain_call(prompt, method="none recorded", step=0.08)]
        for one, seconds in zip(rows, (2.2, 2.1, 2.0, 1.5), strict=True):
            calls.append(drafted_call([(2, 2)] * 4, prompt=prompt, seconds=seconds, method=one.name))
    calls = [replace(call, texts=("a b c",)) for call in calls]
    prompts = [Asked(index, index, "qa", 100, references=("a b c",)) for index in range(8)]
    score = Score("b", None, 8, 1, 1, 1, 1, 1, 1)
    plain = [method("plain"), method("none recorded", "none", engine="recorded")]
    settings = Settings(task="sweep", dtype="float32", precision="int8", do_sample=True)
    return part_of(calls, [*plain, *rows], prompts=prompts, quality=[score], settings=settings, split="train")


def test_the_fastest_row_comes_with_its_command_and_keywords() -> None:
    part = swept()
    lines = best_settings.recommendations(part)
    assert lines[0].startswith("Fastest speculative: speculative decoding, ")
    for words in ("--num_assistant_tokens 8", "--assistant_model small", "--precision int8", "--dtype float32"):
        assert words in lines[0]
    assert "--do_sample" in lines[0]
    assert "generate(…, assistant_model=draft, num_assistant_tokens=8)" in lines[0]
    assert lines[1] == "--num_assistant_tokens 8 is the highest value tried; a value beyond it may be better."
    assert "Fastest bild at no loss: none." in lines, "eight questions exclude nothing"
    assert "on 1 of 1, chosen on the split train" in lines[-1] and "--task subtasks" in lines[-1]


def test_no_row_of_bild_is_named_where_none_wins_a_subtask(monkeypatch) -> None:
    monkeypatch.setattr("hf_specdec.bench.figures.quality.won", lambda *_: 0)
    assert "quality kept: none, on no subtask of the split train" in best_settings.recommendations(swept())[-1]


def test_the_terminals_lines_name_each_method_apart(results: dict[str, Result]) -> None:
    part = whole(results["subtasks"])
    names = re.findall(r"^Overall Result: .*? tokens/sec, (.*?): ", subtasks.terminal(part), flags=re.MULTILINE)
    assert len(set(names)) == len(part.methods) - 1 and "HF assisted, constant 4" in names


def drawn(figure: Figure | None) -> Figure:
    image = drawing.png(figure)
    assert len(image) < 60_000
    return figure


def test_bars_are_rates_and_say_what_the_engine_and_the_draft_bring(results: dict[str, Result]) -> None:
    part = whole(results["engines"])
    figure = drawn(gains.by_engine(part))
    for axes, batch in zip(figure.axes, part.batch_sizes, strict=True):
        here = part.where(batch=batch)
        steps = gains.steps(here)
        assert [one.kind for one, _ in steps] == ["plain", "none", "speculative", "none", "speculative"]
        heights = [bar.get_height() for bar in axes.patches]
        assert heights == pytest.approx([speed.decode_rate(here.of(one.name)) for one, _ in steps])
        for one, base in steps[1:]:
            assert base is not None and (base.engine == one.engine if one.draft else base.kind == "plain")


def test_speedups_by_lookahead_and_quality_are_drawn(results: dict[str, Result]) -> None:
    part = swept()
    (axes,) = drawn(lookahead.by_lookahead(part)).axes
    measured = next(line for line in axes.lines if len(line.get_xdata()) == 3)
    gained = [speed.over(part, one, "engine") for one in part.methods if one.kind == "speculative"]
    assert list(measured.get_ydata()) == pytest.approx([one.value for one in gained if one])
    two = [replace(one, keywords={"drafter": "auto"}) if one.name == "s2" else one for one in part.result.methods]
    (axes,) = drawn(lookahead.by_lookahead(whole(replace(part.result, methods=two)))).axes
    assert not any(len(line.get_xdata()) == 3 for line in axes.lines), "drafters are joined by a line"
    assert lookahead.by_lookahead(part.where(method="s2")) is None and quality.speed_against_quality(part) is None
    changed = part.result.calls[-1]
    calls = [*part.result.calls[:-1], replace(changed, texts=("d",))]
    assert drawn(quality.speed_against_quality(whole(replace(part.result, calls=calls))))
    figure = drawn(gains.by_subtask(whole(results["subtasks"])))
    assert len(figure.axes[0].get_yticklabels()) == len(whole(results["subtasks"]).labels) + 1


def test_acceptance_by_position_has_counts_and_fades_where_few_tokens_tell() -> None:
    part = part_of([drafted_call([(2, 2)] * 20 + [(2, 0)] * 20, prompt=prompt) for prompt in range(1)])
    figure = drawn(lookahead.by_position(part))
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == ["Speculative (n = 40 … 20)"]
    assert lookahead.by_position(part_of([drafted_call([(1, 1)])])) is None, "of one position there is no curve"


def test_points_whose_interval_includes_1_are_hollow() -> None:
    assert drawing.face(Interval(1.1, 0.9, 1.2), "red") == "white"
    assert drawing.face(Interval(1.1, 1.05, 1.2), "red") == drawing.face(Interval(1.1), "red") == "red"


README = """# Title
<!-- summary -->
stale
<!-- /summary -->
<!-- pays {0} -->
<!-- /pays -->
<!-- picture {0} by-engine -->
<!-- /picture -->
"""


@pytest.fixture
def folder(results_folder: Path, tmp_path) -> Path:
    """Some results, and a README that quotes them."""
    (tmp_path / "results").mkdir()
    for task in ("benchmark", "engines"):
        for path in results_folder.glob(f"{task}*"):
            shutil.copy(path, tmp_path / "results")
    (tmp_path / "README.md").write_text(README.format("results/engines-target-draft-greedy"))
    return tmp_path / "results"


def test_a_readme_shows_what_the_results_hold(folder: Path, results: dict[str, Result]) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    run_task(Settings(task="report", output_dir=folder))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before, "rendered again, it is the same"
    text = (folder.parent / "README.md").read_text()
    assert "stale" not in text and "![Decoding speed, target + draft, " in text
    assert "(results/engines-target-draft-greedy-by-engine.png)" in text
    summary, pays = (rows_of(part.strip()) for part in re.findall(r"-->\n(\|.*?)\n<!--", text, re.DOTALL)[:2])
    assert len(summary) == 2 and all(row["n"].isdigit() for row in summary)
    assert [row["Batch"] for row in pays] == ["1", "2", "3"] and len(pays[0]) == 6
    part = whole(results["engines"]).where(batch=1)
    best = speed.fastest(part, speed.drafting(part))
    assert best is not None and pays[0]["Drafting gain"] == ratio(speed.over(part, best, "engine"))
    loaded = {folder / "engines-target-draft-greedy": results["engines"]}
    with pytest.raises(KeyError):
        readme.filled("<!-- pays results/missing -->\n<!-- /pays -->\n", folder.parent, loaded)


def test_damaged_results_are_named_after_the_others_are_rendered(folder: Path, capsys) -> None:
    good = next(folder.glob("benchmark*.md"))
    good.unlink()
    for place, data in enumerate((b"", b"no gzip")):
        (folder / f"z{place}{results.SUFFIX}").write_bytes(data)
    with pytest.raises(BenchError, match=r"z1\.json\.gz' can't be read, is damaged, or is not a result"):
        run_task(Settings(task="report", output_dir=folder))
    assert good.exists() and "z0.json.gz" in capsys.readouterr().err
    empty = folder / "empty"
    empty.mkdir()
    with pytest.raises(BenchError, match="holds no JSON of an earlier task"):
        run_task(Settings(task="report", output_dir=empty))


@pytest.mark.parametrize(("flags", "said"), [("fpu amx_int8", ", AMX"), ("fpu", "")])
def test_tiles_are_among_the_instructions(flags: str, said: str, monkeypatch) -> None:
    monkeypatch.setattr(environment, "reported", lambda name: flags)
    assert environment._instructions().endswith(said) and ("AMX" in environment._instructions()) == bool(said)
