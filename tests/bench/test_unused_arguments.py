"""Arguments without effect are refused, and the help tells for which tasks each argument is."""

from __future__ import annotations

import argparse
import re
from types import ModuleType

import pytest

from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks.task_table import run_task

MEASURING = ("benchmark", "decode", "subtasks", "sweep", "ablation", "engines", "tune", "align")
OTHERS = {"--calls": "3", "--top_p": "0.5", "--temperature": "0.5", "--prompt_template": "a {prompt}"}  # than "1"
# What some arguments need beside them.
BESIDE = {
    "--seed": ["--do_sample"], "--temperature": ["--do_sample"], "--top_k": ["--do_sample"], "--top_p": ["--do_sample"],
    "--draft_vocabulary": ["--assisted_generation"],
    "--fallback_threshold": ["--generation_strategy", "bild"],
    "--rollback_threshold": ["--generation_strategy", "bild"],
    "--lenience": ["--generation_strategy", "lenient"], "--posterior_threshold": ["--generation_strategy", "typical"],
    "--assistant_ensemble_weight": ["--generation_strategy", "ensemble"],
}  # fmt: skip


def arguments(script: ModuleType) -> list[argparse.Action]:
    return [action for action in script.build_parser()._actions if action.dest not in ("help", "task")]


def changed(action: argparse.Action) -> list[str]:
    """The argument with a value that isn't its default."""
    flag = action.option_strings[0]
    if action.nargs == 0:
        return [flag]
    if flag in OTHERS:
        return [flag, OTHERS[flag]]
    return [flag, str(next(value for value in action.choices if value != action.default) if action.choices else "1")]


def told(action: argparse.Action) -> set[str]:
    """The tasks that the help of an argument names."""
    assert action.help is not None
    first, last = re.match(r"([a-z, ]+): ", action.help), re.search(r"; not for ([a-z, ]+)$", action.help)
    named = set(first[1].split(", ")) if first else set()
    if named and named <= set(MEASURING):
        return named
    return set(MEASURING) - set(last[1].split(", ") if last else ())


def accepted(script: ModuleType, words: list[str]) -> bool:
    parser = script.build_parser()
    try:
        script.complete(parser, vars(parser.parse_args(words)))
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize("task", MEASURING)
def test_an_argument_is_accepted_by_the_tasks_that_its_help_names(
    script: ModuleType, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in arguments(script):
        flag = action.option_strings[0]
        beside = BESIDE.get(flag, []) if task in told(action) else []
        if beside[:1] == ["--generation_strategy"] and task == "subtasks":
            beside = []  # it measures speculative decoding and BiLD
        words = ["--task", task, *changed(action), *beside]
        assert accepted(script, words) == (task in told(action)), words
        error = capsys.readouterr().err
        assert task in told(action) or f"argument {flag}: is for --task" in error, words
        for one in re.findall(r"--task ([a-z, ]+);", error):
            assert set(one.split(", ")) == told(action)


def test_report_takes_its_folder_alone(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    taken = {action.dest for action in arguments(script) if accepted(script, ["--task", "report", *changed(action)])}
    assert taken == {"output_dir"}
    assert "argument --repeats: is for --task benchmark, decode," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--task tune --repeats 3", "--repeats: is for --task benchmark"),
        ("--task sweep --prompt_lengths 9", "--prompt_lengths: is for --task benchmark, engines"),
        ("--task decode --prompt_lengths 9", "--prompt_lengths: is for --task benchmark, engines"),
        ("--task engines --drafter lookup", "--drafter: is for --task"),
        ("--task align --fallback_thres 0.1", "--fallback_threshold: is for --task"),
        ("--task subtasks --generation_strategy bild", "--generation_strategy: is for --task"),
        ("--task ablation --better_transformer", "--better_transformer: is for --task"),
        ("--task ablation --reference_column a", "--reference_column: is for --task subtasks, sweep, tune"),
        ("--task ablation --lenience 0.1", "--lenience: is for --generation_strategy lenient"),
        ("--generation_strategy bild --lenience 0.1", "--lenience: is for --generation_strategy lenient"),
        ("--top_k 3", "--top_k: is for --do_sample"),
        ("--temperature 0.5", "--temperature: is for --do_sample"),
        ("--seed 3", "--seed: is for --do_sample, --task align and synthetic pairs"),
        ("--task tune --draft_models a --assistant_model b", "--assistant_model: is not used with --draft_models"),
    ],
)
def test_what_has_no_effect_is_refused_in_one_line(
    script: ModuleType, line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not accepted(script, line.split())
    error = capsys.readouterr().err
    assert f"error: argument {words}" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        "--do_sample --top_k 3 --temperature 0.5 --seed 3",
        "--temperature 0",
        "--task align --seed 3",
        "--model_name synthetic:tiny-llama --seed 3",
        "--task engines --gamma auto",
        "--task subtasks --fallback_thres 0.1 --rollback_thres 1",
        "--task sweep --lenience 0.1 0.2 --fallback_thres 0.1",
        "--task tune --generation_strategy speculative",
    ],
)
def test_what_has_an_effect_or_is_the_default_is_not(script: ModuleType, line: str) -> None:
    assert accepted(script, line.split())


def test_what_needs_a_draft_is_told_once_for_each_argument(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--gamma 3 --draft_dtype float64 --generation_strategy bild --rollback_thres 1 --dtype float64"
    assert accepted(script, line.split())
    said = re.findall(r"(--\w+) is not used without --assisted_generation\n", capsys.readouterr().err)
    assert said == ["--draft_dtype", "--generation_strategy", "--num_assistant_tokens", "--rollback_threshold"]
    for more in (["--assisted_generation"], ["--task", "ablation"]):
        assert accepted(script, [*line.split(), *more]) and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"task": "subtasks", "prompt_template": "a {prompt}"}, "--prompt_template: 'a {prompt}' can't be had from"),
        ({"model_name": "synthetic:tiny-llama", "offload_folder": "x"}, "--offload_folder: 'x' can't be had with"),
    ],
)
def test_what_the_data_or_models_rule_out(given: dict, words: str, tmp_path: object) -> None:
    with pytest.raises(BenchError, match=re.escape(words)):
        run_task(Settings(**given, output_dir=tmp_path))
