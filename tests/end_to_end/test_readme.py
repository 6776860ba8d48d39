"""The documents tell the truth: code and commands run, links and names lead somewhere, figures are in the results."""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.script import load_script
from transformers import GenerationConfig

import hf_specdec
from hf_specdec import embedded, last_speculation
from hf_specdec.bench import results
from hf_specdec.bench.figures import bootstrap
from hf_specdec.bench.reports import readme
from hf_specdec.bench.tasks import TASKS
from hf_specdec.checks import VERSIONS
from hf_specdec.config import FIELDS, SpeculationConfig
from hf_specdec.plugin import ARGUMENTS, KNOWN

ROOT = Path(__file__).parents[2]


def tracked() -> frozenset[str]:
    """The files in version control, relative to the repository."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("no git checkout")
    return frozenset(listing.stdout.split("\0")) - {""}


def read(name: str) -> str:
    """A document's text."""
    return (ROOT / name).read_text(encoding="utf-8")


DOCUMENTS = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)  # fmt: skip


def links(name: str) -> list[str]:
    """The targets of a document's relative links, relative to the repository, without anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", read(name))
    local = [target.split("#")[0] for target in targets if "://" not in target]
    folder = (ROOT / name).parent
    return [str((folder / target).resolve().relative_to(ROOT.resolve())) for target in local if target]


def test_the_quick_start_prints_what_the_readme_shows(capsys) -> None:
    """The first example runs with other names of models, the second as it stands."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", read("README.md"), flags=re.DOTALL)
    known, offline = (text for language, text in blocks if language == "python")
    assert len([line for line in known.splitlines() if line and "import" not in line]) <= 6
    for name, at_hand in (("Qwen/Qwen2.5-7B-Instruct", "target"), ("Qwen/Qwen2.5-0.5B-Instruct", "draft")):
        assert f'"{name}"' in known
        known = known.replace(f'"{name}"', repr(str(embedded.model_path(at_hand))))
    shown = next(text for language, text in blocks if not language and "kettles" in text)
    names: dict = {}
    try:
        exec(compile(known, "README.md", "exec"), names)
        assert last_speculation(names["model"]).accepted > 0
        exec(compile(offline, "README.md", "exec"), names)
    finally:
        for _ in range(2):
            hf_specdec.disable()
    assert capsys.readouterr().out == shown
    asked = {example.turns[0]: example for example in embedded.examples("math_reasoning", "heldout", 10)}
    assert shown.splitlines()[0] == asked[names["question"]].references[0], "the answer is right"


def test_the_readme_is_short_and_narrow() -> None:
    lines = read("README.md").splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 120


def test_links_lead_to_tracked_files() -> None:
    files = tracked()
    folders = {str(parent) for file in files for parent in Path(file).parents}
    for name in DOCUMENTS:
        missing = [target for target in links(name) if target not in files | folders]
        assert not missing, f"{name} links to {missing}"


def test_commands_exist() -> None:
    """Commands of `make` are targets; the script's command lines parse."""
    script = load_script()
    parsers = [task.parser() for task in TASKS.values()]
    options = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    targets = re.findall(r"^([\w-]+):", read("Makefile"), flags=re.MULTILINE)
    parsed = 0
    for name in DOCUMENTS:
        text = read(name)
        for command in re.findall(r"(?:^|`)make ([\w-]+)", text, flags=re.MULTILINE):
            assert command in targets, f"{name}: make {command}"
        # Whole lines, and arguments in backticks.
        lines = re.findall(r"assisted_generation\.py (--[^`\n]*)$", text, flags=re.MULTILINE)
        for line in [*lines, *re.findall(r"`(--[^`]+)`", text)]:
            words = shlex.split(line)
            if len(words) == 1:
                assert words[0] in options, f"{name}: {line}"
            else:
                # A part of a command belongs to a task that takes it.
                whole = line in lines or "--task" in words
                assert whole or all(word in options for word in words if word.startswith("--")), f"{name}: {line}"
                if whole:
                    script.settings_of(words)
                parsed += 1
    assert parsed > 10


def test_settings_exist() -> None:
    """Settings that the documents show as `name=value` are accepted, and `generate` knows the other names."""
    fields, found = set(FIELDS), 0
    for name in ("README.md", "docs/settings.md"):
        for code in re.findall(r"`([a-z_]+=[^`]*)`", read(name)):
            call = ast.parse(f"f({code})", mode="eval").body
            assert isinstance(call, ast.Call)
            given = {str(argument.arg): argument.value for argument in call.keywords}
            assert set(given) <= {*ARGUMENTS, *KNOWN, *vars(GenerationConfig())}, f"{name}: {code}"
            values = {key: ast.literal_eval(value) for key, value in given.items() if key in fields}
            SpeculationConfig(**values)
            found += 1
    assert found > 10


def test_requirements_are_those_of_setup() -> None:
    setup = read("setup.py")
    stated = re.search(r"Python ([\d.]+), torch ([\d.]+) and transformers ([\d.]+)", read("README.md"))
    assert stated
    python, torch, transformers = stated.groups()
    assert f'python_requires=">={python}"' in setup and f'"torch>={torch}"' in setup
    assert f'"transformers>={transformers},' in setup
    for package, (first, end) in VERSIONS.items():
        assert f'"{package.__name__}>={first}{f",<{end}" if end else ""}"' in setup


def figures(text: str) -> set[str]:
    """The numbers with a decimal point that are words of their own."""
    return set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", text))


def linked_rows(name: str) -> Iterator[tuple[str, list[str]]]:
    """A document's table rows that link to a report in results/, each with the report's lines."""
    for row in read(name).splitlines():
        target = re.search(r"\]\(([^)]+/[^)]+\.md)\)", row)
        if row.startswith("|") and target:
            yield row, ((ROOT / name).parent / target[1]).read_text(encoding="utf-8").splitlines()


def test_figures_are_those_of_the_results() -> None:
    rows = list(linked_rows("results/README.md"))
    assert len(rows) > 4
    for row, report in rows:
        found = figures(" ".join(row.split("|")[-3:]))
        # A figure and its interval stand in one line.
        assert found and any(found <= figures(line) for line in report), row


def test_parts_taken_from_results_are_up_to_date(monkeypatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 2000)  # tests of bench in the same process take fewer
    suffix = results.SUFFIX
    texts = read("README.md") + read("results/README.md")
    paths = [ROOT / name for name in tracked() if name.endswith(suffix) and Path(name).name[: -len(suffix)] in texts]
    loaded = {path.with_name(path.name.removesuffix(results.SUFFIX)): results.load(path) for path in paths}
    assert readme.has_parts(read("README.md"))
    for name in ("README.md", "results/README.md"):
        text = read(name)
        assert readme.filled(text, (ROOT / name).parent, loaded) == text, f"{name}: run --task report"
