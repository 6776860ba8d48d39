"""The script as users call it: arguments, errors in one line, files, and where it can be called from."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.tiny_pair import CONTEXT, save_pair

from hf_specdec.bench.inputs import questions
from hf_specdec.bench.results import load
from hf_specdec.bench.settings import BenchError, Settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    target, draft = save_pair(tmp_path_factory.mktemp("models"))
    return ["--model_name", str(target), "--assistant_model", str(draft), "--max_new_tokens", "6"]


def parse(script: ModuleType, line: str) -> dict[str, Any]:
    found: dict[str, Any] = vars(script.settings_of(line.split()))
    return found


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error, which has to be a single line on stderr with nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(("alias", "name", "value"), [
    ("--target_model_name x", "model_name", "x"),
    ("--approx_model_name y", "assistant_model", "y"),
    ("--gamma 3", "num_assistant_tokens", 3),
    ("--task sweep --n_lookahead 3 5", "grid", {"num_assistant_tokens": (3, 5)}),
    ("--generation_strategy bild --fallback_thres 0", "fallback_threshold", 0.0),
    ("--generation_strategy bild --rollback_thres 0", "rollback_threshold", 0.0),
    ("--max_tokens 9", "max_new_tokens", 9),
    ("--prompt_lengths 8 9", "prompt_lengths", (8, 9)),
    ("--task decode --prompt a --prompt b", "prompts", ("a", "b")),
])  # fmt: skip
def test_aliases(script: ModuleType, alias: str, name: str, value: object) -> None:
    assert parse(script, alias)[name] == value


def test_settings_of_ours_reach_the_run(script: ModuleType) -> None:
    line = "--gamma auto --drafter hybrid --verification block --entropy_threshold 0.4 --compile --batch_size 3"
    settings = Settings(**parse(script, line))
    assert (settings.num_assistant_tokens, settings.drafter, settings.verification) == ("auto", "hybrid", "block")
    assert (settings.entropy_threshold, settings.compile, settings.batch_size) == (0.4, True, 3)
    line = "--task sweep --gamma 2 auto --compile no yes --cache_implementation static --rollback_thres 1 2"
    settings = Settings(**parse(script, line))
    assert settings.grid == {
        "num_assistant_tokens": (2, "auto"), "compile": (False, True), "cache_implementation": ("static",),
        "rollback_threshold": (1.0, 2.0),
    }  # fmt: skip
    assert settings.values("rollback_threshold") == (1.0, 2.0) and settings.values("fallback_threshold") == (0.6,)
    engines = Settings(**parse(script, "--task engines --gamma 3 5"))
    assert engines.grid == {"num_assistant_tokens": (3, 5)} and engines.batch_sizes == (1, 4, 8)


def test_defaults_are_the_published_ones(script: ModuleType) -> None:
    options = parse(script, "")
    assert (options["task"], options["model_name"]) == ("benchmark", "target")
    assert (options["prompt_lengths"], options["max_new_tokens"]) == ((256, 512), 30)
    settings = Settings(**options)
    assert (settings.fallback_threshold, settings.rollback_threshold, settings.repeats) == (0.6, 3.0, 7)
    assert options["output_dir"] == Path("runs")


@pytest.mark.parametrize(("line", "words"), [
    ("--task nonsense", ["--task", "'nonsense'", "'benchmark'"]),
    ("--gamma 0", ["--num_assistant_tokens", "'0'", "at least 1"]),
    ("--fallback_thres 1.5", ["--fallback_threshold", "'1.5'", "from 0 to 1"]),
    ("--rollback_threshold nan", ["--rollback_threshold", "'nan'", "at least 0"]),
    ("--temperature -1", ["--temperature", "'-1'", "at least 0"]),
    ("--generation_strategy beam", ["--generation_strategy", "'beam'", "'bild'"]),
    ("--max_tokens many", ["--max_new_tokens", "'many'", "integer"]),
    ("--prompt_lengths", ["--prompt_lengths", "at least one"]),
    ("--bogus 1", ["--bogus"]),
    ("--gamma 2 3", ["unrecognized arguments: 3"]),
    ("--draft_models a b", ["unrecognized arguments: --draft_models"]),
    ("--draft_vocabulary 9", ["--draft_vocabulary", "--assisted_generation"]),
    ("--chat_template_kwargs yes", ["--chat_template_kwargs", "'yes'", "a JSON object"]),
    ("--task sweep --prompt a", ["unrecognized arguments: --prompt"]),
    ("--gamma often", ["--num_assistant_tokens", "'often'", "or auto"]),
    ("--task sweep --prompt_template nothing", ["--prompt_template", "'nothing'", "{prompt}"]),
    # without effect
    ("--task tune --repeats 3", ["error: unrecognized arguments: --repeats"]),
    ("--task engines --verification block", ["error: unrecognized arguments: --verification"]),
    ("--prompt a --prompt_lengths 9", ["error: argument --prompt_lengths: is not used with --prompt or --dataset"]),
    ("--task engines --prompt a --dataset spec_bench", ["error: argument --prompt: is not used with --dataset"]),
    ("--gguf_file a.gguf", ["error: argument --gguf_file: is for --model_name"]),
    ("--task ablation --lenience 0.1", ["error: argument --lenience: is for --generation_strategy lenient"]),
    (
        "--generation_strategy bild --lenience 0.1",
        ["error: argument --lenience: is for --generation_strategy lenient"],
    ),
    ("--top_k 3", ["error: argument --top_k: is for --do_sample"]),
    ("--temperature 0.5", ["error: argument --temperature: is for --do_sample"]),
    ("--seed 3", ["error: argument --seed: is for --do_sample, --task align or draft, and synthetic pairs"]),
    ("--task tune --draft_models a --assistant_model b", ["error: argument --assistant_model: is not used with"]),
])  # fmt: skip
def test_bad_arguments(script: ModuleType, line: str, words: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as end:
        script.main(line.split())
    assert end.value.code == 2
    error = one_line(capsys)
    assert all(word in error for word in words), error


@pytest.mark.parametrize(("extra", "words"), [
    (["--model_name", "no/such-folder/at-all"], ["--model_name", "'no/such-folder/at-all'", "local folder"]),
    (["--assistant_model", "no/such/draft"], ["--assistant_model", "'no/such/draft'", "local folder"]),
    (["--device", "cuda:77"], ["--device", "'cuda:77'", "cpu"]),
    (["--draft_device", "toaster"], ["--draft_device", "'toaster'", "cpu"]),
    (["--prompt_lengths", "500"], ["--prompt_lengths", "500", str(CONTEXT), "shorter"]),
    (["--task", "decode", "--prompt", " "], ["--prompt", "' '", "give some text"]),
    (["--task", "decode", "--max_new_tokens", "500"], ["--max_new_tokens", "500", str(CONTEXT), "fewer"]),
])  # fmt: skip
def test_what_the_user_can_put_right(script, models, tmp_path, extra: list[str], words: list[str], capsys) -> None:
    status = script.main([*models, "--assisted_generation", "--output_dir", str(tmp_path), *extra])
    error = one_line(capsys)
    assert status == 1 and all(word in error for word in words), error
    assert list(tmp_path.iterdir()) == []


def test_output_dir_that_cannot_be_written_to(script: ModuleType, models: list[str], tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("in the way")
    line = [*models, "--assisted_generation", "--output_dir", str(tmp_path / "file" / "below")]
    assert script.main(line) == 1
    error = one_line(capsys)
    assert "--output_dir" in error and "give a folder" in error


def test_a_target_without_a_known_draft(script: ModuleType, models: list[str], tmp_path, capsys) -> None:
    os.rename(models[1], renamed := Path(models[1]).with_name("nobody-knows"))
    try:
        status = script.main(["--model_name", str(renamed), "--assisted_generation", "--output_dir", str(tmp_path)])
    finally:
        os.rename(renamed, models[1])
    assert status == 1 and "--assistant_model: not given" in one_line(capsys)


@pytest.mark.parametrize("task", ["benchmark", "sweep"])
@pytest.mark.parametrize("draft", [None, "--assistant_model"])
def test_a_missing_target_is_named_before_its_draft(script, task: str, draft: str | None, tmp_path, capsys) -> None:
    """No draft is known for it, and one that is named may be missing, too."""
    missing = str(tmp_path / "missing")
    line = ["--task", task, "--assisted_generation", "--model_name", missing, "--output_dir", str(tmp_path / "results")]
    assert script.main([*line, *([draft, missing] if draft else [])]) == 1
    assert f"--model_name: {missing!r} can't be loaded (there is no such folder)" in one_line(capsys)


@pytest.mark.parametrize(("lines", "words"), [
    (None, "can't be read (No such file or directory)"),
    ("", "has no questions"),
    ('{"q": "one"}\nnot JSON\n', "line 2 of"),
    ('{"q": "one"}\n{"x": "two"}\n', "--prompt_column: 'q' is not in row 2"),
    ('{"q": 7}\n', "line 1 of"),
    ('{"q": "one"}\n{"q": "two \\ud83d"}\n', "line 2 of"),
    ('{"q": "one"}\n{"q": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "line 2 of"),
    ('{"q": "one"}\n{"q": "two", "x": ' + "[" * 980 + "]" * 980 + "}\n", "line 2 of"),
])  # fmt: skip
def test_data_sets_that_cannot_be_used(script, models, tmp_path, lines: str | None, words: str, capsys) -> None:
    path = tmp_path / "questions.jsonl"
    if lines is not None:
        path.write_text(lines)
    task = ["--task", "subtasks", "--dataset", str(path), "--prompt_column", "q"]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own; compilers raise it
    try:
        assert script.main([*models, *task, "--output_dir", str(tmp_path / "out")]) == 1
    finally:
        sys.setrecursionlimit(limit)
    assert words in one_line(capsys)


@pytest.mark.parametrize(("item", "words"), [
    ({"category": "qa", "turns": "one text"}, "a list of turns"),
    ({"category": "qa", "turns": 5}, "a list of turns"),
    ({"category": "qa", "turns": ["a"], "reference": "one text"}, "its reference is not a list"),
    ({"category": "qa", "turns": ["a"], "reference": 5}, "its reference is not a list"),
    ({"category": "qa \ud83d", "turns": ["a"]}, "half a surrogate pair"),
    ({"category": "qa", "turns": ["a"], "reference": ["\udca9"]}, "half a surrogate pair"),
])  # fmt: skip
def test_spec_bench_lines_of_another_shape(tmp_path, item: dict[str, Any], words: str) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps({"category": "qa", "turns": ["a"]}) + "\n" + json.dumps(item) + "\n")
    with pytest.raises(BenchError, match=f"line 2 of .*{words}"):
        questions.dialogues(Settings(task="subtasks", dataset="spec_bench", dataset_path=path))


def test_arguments_that_no_result_could_hold_are_refused(script: ModuleType, capsys) -> None:
    assert script.main(["--task", "decode", "--prompt", "caf\udce9"]) == 1
    assert "argument 'caf\\udce9': is not UTF-8" in one_line(capsys)


def test_a_path_that_would_not_be_read_is_refused(tmp_path) -> None:
    with pytest.raises(BenchError, match=r"--dataset_path: .* is only read by --dataset spec_bench"):
        questions.dialogues(Settings(task="subtasks", dataset_path=tmp_path / "question.jsonl"))
    for option in ("prompt_column", "reference_column"):
        with pytest.raises(BenchError, match=f"--{option}: 'text' does not apply to embedded"):
            questions.dialogues(Settings(task="subtasks", **{option: "text"}))


def test_a_file_has_no_split(tmp_path) -> None:
    path = tmp_path / "questions.csv"
    path.write_text("q\none\n")
    asked = {"task": "subtasks", "dataset": str(path), "prompt_column": "q"}
    assert questions.split_of(Settings(**asked)) is None and len(questions.dialogues(Settings(**asked))) == 1
    with pytest.raises(BenchError, match="--split: 'train' does not apply to a file"):
        questions.dialogues(Settings(**asked, split="train"))
    named = {name: questions.split_of(Settings(dataset=name)) for name in ("embedded", "spec_bench", "owner/name")}
    assert named == {"embedded": "heldout", "spec_bench": None, "owner/name": "test"}


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "No columns"), (b"q\none\ntwo,three\n", "line 3"), (b"q\n\xff\xfe\n", "can't decode")]
)
def test_tables_that_cannot_be_read_are_said_with_their_cause(tmp_path, content: bytes, words: str, capsys) -> None:
    path = tmp_path / "questions.csv"
    path.write_bytes(content)
    with pytest.raises(BenchError, match=words) as refused:
        questions.dialogues(Settings(task="subtasks", dataset=str(path), prompt_column="q"))
    assert "--split" not in str(refused.value) and capsys.readouterr().err == ""


def test_data_sets_with_scripts_are_read_from_the_hub_s_parquet_copy(monkeypatch) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None = None, **more: Any) -> list[dict[str, str]]:
        asked.append((name, config, more.get("data_files")))
        if name == "owner/old":
            raise RuntimeError("Dataset scripts are no longer supported, but found old.py")
        return [{"text": "one"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    settings = Settings(task="subtasks", dataset="owner/old:japanese", prompt_column="text", split="validation")
    assert [question.turns for (question,) in questions.dialogues(settings)] == [("one",)]
    copy = "hf://datasets/owner/old@refs/convert/parquet/japanese/validation/*.parquet"
    assert asked == [("owner/old", "japanese", None), ("parquet", None, copy)]
    asked.clear()
    questions.dialogues(Settings(task="subtasks", dataset="owner/new", prompt_column="text"))
    assert asked == [("owner/new", None, None)], "others as they are"


def test_spec_bench_categories(tmp_path) -> None:
    path = tmp_path / "question.jsonl"
    rows = [
        {"category": "coding", "turns": ["a", "b"], "reference": ["", "r2"]},
        {"category": "rag", "turns": ["c"], "reference": [["x", "y"]]},
        {"category": "qa", "turns": ["d"]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = Settings(task="subtasks", dataset="spec_bench", dataset_path=path)
    (first, second), (rag,), (qa,) = questions.dialogues(settings)
    assert (first.subtask, second.subtask, rag.subtask, qa.subtask) == ("multi-turn", "multi-turn", "rag", "qa")
    assert second.turns == ("a", "b") and second.earlier == (0,) and second.references == ("r2",)
    assert first.references == () and rag.references == ("x", "y") and qa.references == ()
    assert [first.index, second.index, rag.index, qa.index] == [0, 1, 2, 3]
    one = replace(settings, dataset="spec_bench:rag")
    ((alone,),) = questions.dialogues(one)
    assert alone.turns == rag.turns and questions.split_of(one) is None
    with pytest.raises(BenchError, match="'sums' is not a subtask of these questions; give one of multi-turn, rag, qa"):
        questions.dialogues(replace(settings, dataset="spec_bench:sums"))


def test_temperature_zero_is_greedy(script: ModuleType, models: list[str], tmp_path, capsys) -> None:
    line = ["--do_sample", "--temperature", "0", "--task", "decode", "--prompt", "Hello there"]
    assert script.main([*models, "--output_dir", str(tmp_path), *line]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "decode-target-plain-greedy.json.gz",
        "decode-target-plain-greedy.md",
    ]
    result = load(tmp_path / "decode-target-plain-greedy.json.gz")
    assert result.settings.sampling is False and result.settings.temperature == 0
    assert "- greedy, at most 6 new tokens" in capsys.readouterr().out


def test_decode_streams_text_and_prints_the_table(script: ModuleType, models: list[str], tmp_path, capsys) -> None:
    line = ["--task", "decode", "--assisted_generation", "--generation_strategy", "bild", "--fallback_thres", "0.1"]
    assert script.main([*models, "--output_dir", str(tmp_path), *line, "--prompt", "One", "--prompt", "Two"]) == 0
    out = capsys.readouterr().out
    texts, table = out.split("# Decode")
    assert texts.count("--- ") == 2 and "BiLD (fallback 0.1, rollback 3)" in table
    assert "Tokens/Round" in table


def test_main_job_from_the_folder_of_the_script(models: list[str], tmp_path) -> None:
    before = sorted(path for path in (ROOT / "scripts").glob("*") if path.name != "__pycache__")
    short = ["--prompt_lengths", "20", "--limit", "1", "--repeats", "1", "--do_sample", "--output_dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "assisted_generation.py", *models, "--task", "benchmark", "--assisted_generation", *short],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        # One thread: on a busy machine several wait for each other for seconds.
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Time/Token (ms)" in done.stdout and "Acceptance" in done.stdout
    assert "over plain decoding" in done.stdout and "over transformers' assisted generation" in done.stdout
    assert "benchmark" in done.stderr and "Traceback" not in done.stderr
    stem = "benchmark-target-draft-speculative-sampling"
    names = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".png")
    assert names == [f"{stem}.json.gz", f"{stem}.md"]
    assert (tmp_path / f"{stem}.md").read_text() == done.stdout
    assert sorted(path for path in (ROOT / "scripts").glob("*") if path.name != "__pycache__") == before


def test_a_default_run_leaves_git_clean() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    for place in ("runs/x.json.gz", "runs/x.md", "scripts/runs/x.png"):
        assert subprocess.run(["git", "-C", str(ROOT), "check-ignore", "-q", place], check=False).returncode == 0
