"""The task `report`: several pairs joined, READMEs filled from results, and files that can't be used."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.made_up_results import drafted_call, method, plain_call, result_of

from hf_specdec.bench.figures import speed, tradeoff
from hf_specdec.bench.reports import readme, summary
from hf_specdec.bench.reports.markdown import ratio
from hf_specdec.bench.reports.tables import pairs
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import environment
from hf_specdec.bench.storage.results import SUFFIX, load, to_bytes
from hf_specdec.bench.tasks import report

Result = dict[str, Any]

TEXT = """# A page
<!-- summary -->
old
<!-- /summary -->
between
<!-- speed {stem} -->
<!-- /speed -->
<!-- picture {stem} waterfall -->
<!-- /picture -->
<!-- pays -->
<!-- /pays -->
"""


@pytest.fixture(scope="module")
def reported(results_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a README and a folder of results with one of its own, after `report`."""
    project = tmp_path_factory.mktemp("project")
    folder = project / "results"
    (folder / "pair").mkdir(parents=True)
    for path in results_folder.glob(f"*{SUFFIX}"):
        shutil.copy(path, folder / "pair")
    stem = next(path.name for path in (folder / "pair").glob("benchmark*")).removesuffix(SUFFIX)
    (folder / "README.md").write_text(TEXT.format(stem=f"pair/{stem}"))
    (project / "README.md").write_text(TEXT.format(stem=f"results/pair/{stem}"))
    report.run_report(Settings(task="report", output_dir=folder))
    return project


def loaded(project: Path) -> dict[Path, Result]:
    paths = sorted((project / "results").rglob(f"*{SUFFIX}"))
    return {path.with_name(path.name.removesuffix(SUFFIX)): load(path) for path in paths}


def test_markdown_and_pictures_lie_beside_each_result(reported: Path, results_folder: Path) -> None:
    for stem in loaded(reported):
        assert stem.with_name(f"{stem.name}.md").read_text() == (results_folder / f"{stem.name}.md").read_text()
        assert list(stem.parent.glob(f"{stem.name}-*.png"))
    assert (reported / "results" / "pairs-greedy-and-sampling.png").read_bytes().startswith(b"\x89PNG")


def test_every_claim_of_the_summary_is_in_the_results(reported: Path, results: dict[str, Result]) -> None:
    text = (reported / "results" / "README.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ") and "](pair/" in line]
    claims = [claim for result in loaded(reported).values() for claim in summary.claims(result)]
    assert len(claims) > 20 and all(any(claim.words in line for line in lines) for claim in claims)
    gain = speed.speedup(results["benchmark"], "speculative", "none eager")
    assert gain is not None and gain.low is not None and gain.high is not None
    (line,) = [line for line in lines if "benchmark" in line and "over plain on the same engine" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:3] == [f"{gain.value:.2f}", f"{gain.low:.2f} to {gain.high:.2f}"]
    assert cells[4].endswith("1 thread")
    target = cells[3].split("](")[1].rstrip(")")
    assert (reported / "results" / target).is_file()


def test_a_readme_shows_what_the_results_hold(reported: Path) -> None:
    for page in (reported / "README.md", reported / "results" / "README.md"):
        text = page.read_text()
        assert "old" not in text and "\nbetween\n" in text, "only the parts between markers change"
        assert readme.filled(text, page.parent.resolve(), {s.resolve(): r for s, r in loaded(reported).items()}) == text
        links = [line.split("](")[1].split(")")[0] for line in text.splitlines() if "](" in line]
        assert links and all((page.parent / link).is_file() for link in links)


def test_a_table_can_be_limited_to_folders(reported: Path) -> None:
    results = {stem.resolve(): result for stem, result in loaded(reported).items()}

    def rows(folders: str) -> int:
        text = readme.filled(f"<!-- pays{folders} -->\n<!-- /pays -->", reported.resolve(), results)
        return text.count("](results/pair/engines")

    assert rows("") == rows(" elsewhere results/pair") > 0
    assert rows(" elsewhere") == rows(" results") == 0


def test_plain_rates_are_those_that_speedups_are_over(results: dict[str, Result]) -> None:
    """On a GPU, `generate()` also has a static cache, which may be the faster one."""
    result = results["engines"]
    plain = speed.method_named(result, "plain")
    static = [replace(call, method="plain static", seconds=0.5 * call.seconds, first_seconds=0.5 * call.first_seconds)
              for call in result["calls"] if call.method == "plain"]  # fmt: skip
    both = result | {
        "methods": [*result["methods"], plain | {"name": "plain static"}],
        "calls": result["calls"] + static,
    }

    def rate(shown: Result) -> float:
        header, _, row, *_ = summary.engine_rows({"link.md": shown}).splitlines()
        cells = dict(zip(*[[cell.strip() for cell in line.split("|")] for line in (header, row)], strict=True))
        return float(cells["Plain generate() (tokens/s)"])

    assert rate(both) == pytest.approx(2 * rate(result), rel=1e-2)


def test_a_readme_that_no_longer_fits_is_seen(reported: Path) -> None:
    text = (reported / "README.md").read_text()
    results = {stem.resolve(): result for stem, result in loaded(reported).items()}
    stem = next(stem for stem in results if stem.name.startswith("benchmark"))
    slower = [replace(call, seconds=2 * call.seconds) for call in results[stem]["calls"]]
    changed = results | {stem: results[stem] | {"calls": slower}}
    assert readme.filled(text, reported.resolve(), changed) != text


def test_a_part_that_asks_for_a_missing_result_is_named(reported: Path, tmp_path: Path) -> None:
    for path in (reported / "results" / "pair").glob("engines*.gz"):
        shutil.copy(path, tmp_path)
    (tmp_path / "README.md").write_text("<!-- speed nowhere/none -->\n<!-- /speed -->\n")
    with pytest.raises(BenchError, match=r"README\.md' asks for a result .*nowhere/none"):
        report.run_report(Settings(task="report", output_dir=tmp_path))


def test_pairs_stand_in_one_table(results: dict[str, Result]) -> None:
    other = results["subtasks"] | {"models": {"target": {"name": "x/large"}, "draft": {"name": "x/small"}}}
    both = [results["subtasks"], other, results["sampling"]]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in pairs.pair_table(both, "engine").splitlines()
    ]
    assert header[:5] == ["Target", "Draft", "Data", "Tokens chosen by", "Method"]
    assert header[5:-2] == tradeoff.labels(results["subtasks"])
    assert {row[0] for row in rows} == {"target", "large"} and {row[3] for row in rows} == {"greedy", "sampling"}
    micro, macro = (speed.speedup(results["subtasks"], "speculative", "none eager", by=by) for by in ("micro", "macro"))
    row = next(row for row in rows if row[0] == "target" and row[4].startswith("Speculative"))
    assert row[-2:] == [ratio(micro), ratio(macro)]


def test_one_result_of_subtasks_is_not_joined(results_folder: Path, tmp_path: Path) -> None:
    path = next(results_folder.glob(f"subtasks*greedy{SUFFIX}"))
    shutil.copy(path, tmp_path)
    report.run_report(Settings(task="report", output_dir=tmp_path))
    assert not (tmp_path / "pairs.md").exists()


def test_results_of_different_machines_are_warned_about(results: dict[str, Result]) -> None:
    result = results["benchmark"]
    assert report.differences([(Path("a"), result), (Path("b"), result)]) == []
    for name, said in (("cpu", "processor"), ("instructions", "instructions of the processor")):
        other = result | {"environment": result["environment"] | {name: "another"}}
        (line,) = report.differences([(Path("a"), result), (Path("b"), other)])
        assert f"differ in {said}," in line and 'b: "another"' in line


def test_a_machine_is_named_with_its_instructions(results: dict[str, Result]) -> None:
    described = {"cpu": "EPYC", "instructions": "AVX2", "gpus": [], "torch_threads": 2}
    result = results["benchmark"]
    assert summary.machine(result | {"environment": described}) == "EPYC (AVX2), 2 threads"
    del described["instructions"]  # as in files of earlier versions
    assert summary.machine(result | {"environment": described}) == "EPYC, 2 threads"


@pytest.mark.parametrize(("flags", "said"), [("fpu avx2 amx_int8", "AVX2, AMX"), ("fpu avx2 amx", "AVX2")])
def test_tiles_are_among_the_instructions(flags: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "reported", lambda name: flags)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert environment.describe()["instructions"] == said


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 0}', None], ids=["cut off", "list", "format", "not gzip"])
def test_files_that_are_no_results_are_named(tmp_path: Path, text: str | None) -> None:
    (tmp_path / f"x{SUFFIX}").write_bytes(b"{" if text is None else gzip.compress(text.encode()))
    with pytest.raises(BenchError, match=r"x\.json\.gz' is damaged or no result"):
        report.run_report(Settings(task="report", output_dir=tmp_path))


def test_damaged_results_among_others_are_named_after_the_others_are_rendered(
    results: dict[str, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "c"):
        (tmp_path / f"{name}{SUFFIX}").write_bytes(to_bytes(results["engines"])[:-20])
    (tmp_path / f"b{SUFFIX}").write_bytes(to_bytes(results["benchmark"]))
    (tmp_path / f"d{SUFFIX}").write_bytes(to_bytes(results["engines"]))
    with pytest.raises(BenchError, match=r"c\.json\.gz' is damaged"):
        report.run_report(Settings(task="report", output_dir=tmp_path))
    assert "a.json.gz' is damaged" in capsys.readouterr().err
    assert {path.name for path in tmp_path.glob("*.md")} == {"b.md", "d.md"}


def test_a_result_without_its_keys_is_named(results: dict[str, Result], tmp_path: Path) -> None:
    result = {key: value for key, value in results["engines"].items() if key != "memory"}
    (tmp_path / f"x{SUFFIX}").write_bytes(to_bytes(result))
    with pytest.raises(BenchError, match=r"x\.json\.gz' is no result of this version \(KeyError\('memory'\)\)"):
        report.run_report(Settings(task="report", output_dir=tmp_path))


def test_a_disk_too_full_for_a_picture_is_said(results: dict[str, Result], tmp_path: Path) -> None:
    (tmp_path / f"x{SUFFIX}").write_bytes(to_bytes(results["engines"]))
    # In its place, since writing there then fails as on a full disk.
    (tmp_path / "x-waterfall.png").mkdir()
    with pytest.raises(BenchError, match=r"--output_dir: writing to .* failed"):
        report.run_report(Settings(task="report", output_dir=tmp_path))
    assert (tmp_path / "x.md").is_file(), "the rest is there"


def test_a_folder_without_results_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({}))
    with pytest.raises(BenchError, match=r"--output_dir: .* holds no"):
        report.run_report(Settings(task="report", output_dir=tmp_path))


MODELS = {"target": {"name": "large", "dtype": "float32"}, "draft": {"name": "small", "dtype": "float32"}}


def found_in(task: str, result: Result) -> dict[str, float]:
    return {claim.words: claim.found.value for claim in summary.claims({**result, "task": task, "models": MODELS})}


def test_engines_are_compared_with_llama_cpp_plain_with_plain_and_drafting_with_drafting() -> None:
    theirs = {"kind": "llama.cpp", "engine": "llama.cpp-f32"}
    methods = [
        method("plain"),
        method("ours", "none", engine="compiled", same_engine="ours"),
        method("ours drafting", "speculative", engine="compiled", same_engine="ours"),
        method("theirs", **theirs, role="plain"),
        method("theirs drafting", **theirs, role="fixed"),
    ]
    calls = [
        plain_call(step=step, method=name)
        for name, step in (("plain", 0.8), ("ours", 0.4), ("theirs", 0.2), ("theirs drafting", 0.1))
    ]
    # Six tokens behind the first delivery, in half a second.
    calls.append(drafted_call([(4, 4), (4, 4), (4, 0)], seconds=1.5, method="ours drafting"))
    found = found_in("engines", result_of(calls, methods))
    where, pair = "Batch size 1, prompts of 100 tokens", "(large + small, greedy)"
    assert found[f"{where}: ours, over llama.cpp-f32 plain {pair}"] == pytest.approx(0.5)
    assert found[f"{where}: ours drafting, over llama.cpp-f32 with a draft {pair}"] == pytest.approx(1.2)


def test_a_trimmed_draft_is_compared_with_the_whole_one() -> None:
    ours = {"engine": "eager", "same_engine": "none eager"}
    methods = [
        method("plain"),
        method("whole", "speculative", **ours),
        method("trimmed", "speculative", draft="small, head of 800 tokens", **ours),
    ]
    # Six tokens behind the first delivery, in two seconds and in one.
    calls = [plain_call()]
    calls += [
        drafted_call([(4, 4), (4, 4), (4, 0)], seconds=seconds, method=name)
        for name, seconds in (("whole", 3.0), ("trimmed", 2.0))
    ]
    found = found_in("benchmark", result_of(calls, methods))
    words = "Prompts of 100 tokens: whole, head of 800 tokens, over the whole head (large + small, greedy)"
    assert found[words] == pytest.approx(2.0)
    (alone,) = found_in("benchmark", result_of(calls[:2], methods[:2])).items()
    assert "whole over plain generate()" in alone[0], "a run without a trimmed draft claims nothing about one"


def test_an_aligned_draft_s_gain_is_a_claim() -> None:
    calls = [drafted_call([(4, 1)], method="before"), drafted_call([(4, 3)], method="after")]
    result = result_of(calls, [method(name, "speculative") for name in ("before", "after")])
    words = "Acceptance on held-out prompts, aligned draft − draft as it was (large + small, greedy)"
    assert found_in("align", result) == {words: pytest.approx(50.0)}
