"""The documents tell the truth: code and commands run, links and names lead somewhere, figures are in the results."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec import embedded
from hf_specdec.config import SpeculationConfig
from hf_specdec.plugin import KNOWN

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
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "results/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)


def links(name: str) -> list[str]:
    """The targets of a document's relative links, relative to the repository, without anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", read(name))
    local = [target.split("#")[0] for target in targets if "://" not in target]
    folder = (ROOT / name).parent
    return [str((folder / target).resolve().relative_to(ROOT.resolve())) for target in local if target]


def test_the_quick_start_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", read("README.md"), flags=re.DOTALL)
    code = [text for language, text in blocks if language == "python"]
    assert len([line for line in code[1].splitlines() if line]) <= 6, "an import and five lines"
    shown = next(text for language, text in blocks if not language and "kettles" in text)
    names: dict = {}
    try:
        exec(compile("\n".join(code), "README.md", "exec"), names)
    finally:
        hf_specdec.disable()
    assert capsys.readouterr().out == shown
    asked = {example.turns[0]: example for example in embedded.examples("math_reasoning", "heldout", 10)}
    assert shown.splitlines()[0] == asked[names["question"]].references[0], "the answer is right"


def test_the_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 150


def test_links_lead_to_tracked_files() -> None:
    files = tracked()
    folders = {str(parent) for file in files for parent in Path(file).parents}
    for name in DOCUMENTS:
        missing = [target for target in links(name) if target not in files | folders]
        assert not missing, f"{name} links to {missing}"


def test_the_file_map_names_every_module() -> None:
    modules = {file for file in tracked() if re.fullmatch(r"(hf_specdec|scripts)/.*\.py", file)}
    named = set(links("CONTRIBUTING.md"))
    # A package's `__init__` is named by its folder.
    missing = {file for file in modules if file.removesuffix("/__init__.py") not in named}
    assert not missing


def test_commands_exist() -> None:
    """Commands of `make` are targets; the script's command lines parse."""
    spec = importlib.util.spec_from_file_location("assisted_generation", ROOT / "scripts" / "assisted_generation.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    parser = script.build_parser()
    targets = re.findall(r"^(\w+):", read("Makefile"), flags=re.MULTILINE)
    parsed = 0
    for name in DOCUMENTS:
        text = read(name)
        for command in re.findall(r"(?:^|`)make (\w+)", text, flags=re.MULTILINE):
            assert command in targets, f"{name}: make {command}"
        # Whole lines, and arguments in backticks.
        lines = re.findall(r"assisted_generation\.py (--.*)$", text, flags=re.MULTILINE)
        for line in [*lines, *re.findall(r"`(--[^`]+)`", text)]:
            arguments = [word for word in shlex.split(line.replace("…", "x")) if word != "x"]
            if " " not in line:
                assert arguments[0] in parser._option_string_actions, f"{name}: {line}"
                continue
            script.complete(parser, vars(parser.parse_args(arguments)))
            parsed += 1
    assert parsed > 10


def test_settings_exist() -> None:
    """Arguments of `generate` that documents name in backticks are the package's or transformers', and valid."""
    known = KNOWN | {"assistant_model", "generation_strategy", *SpeculationConfig.__dataclass_fields__}
    found = 0
    for name in ("README.md", "docs/settings.md"):
        for call in re.findall(r"`([a-z_]+=[^`]*)`", read(name)):
            arguments = eval(f"dict({call})", {"draft": None, "hf_specdec": hf_specdec})
            settings = {key: value for key, value in arguments.items() if key in SpeculationConfig.__dataclass_fields__}
            SpeculationConfig(arguments.get("generation_strategy") or "speculative", **settings)
            unknown = set(arguments) - known - {"cache_implementation", "use_cache", "return_dict_in_generate"}
            assert not unknown, f"{name}: {call}"
            found += 1
    assert found > 10


def test_requirements_are_those_of_setup() -> None:
    setup, readme = read("setup.py"), read("README.md")
    versions = re.search(r"Python ([\d.]+), torch ([\d.]+) and transformers ([\d.]+)", readme)
    assert versions
    for requirement in ("{}>=" + version for version in versions.groups()):
        assert any(requirement.format(name) in setup for name in ("torch", "transformers")) or (
            f'python_requires="{requirement.format("")}"' in setup
        )


def figures(row: str) -> list[str]:
    """The figures of a table's row: cells, or parts of them, that are numbers with a decimal point."""
    return re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", row)


def test_figures_are_those_of_the_results() -> None:
    """Rows of results/README.md name a file of results that holds their figures; README's figures are in one of them."""
    checked = 0
    for row in read("results/README.md").splitlines():
        target = re.search(r"\]\(([^)]+\.md)\)", row)
        if row.startswith("|") and target:
            known = figures((ROOT / "results" / target[1]).read_text(encoding="utf-8"))
            missing = set(figures(row)) - set(known)
            assert not missing, f"{target[1]} lacks {missing}"
            checked += len(figures(row))
    assert checked > 20
    everywhere = {n for path in (ROOT / "results").rglob("*.md") if path.name != "README.md"
                  for n in figures(path.read_text(encoding="utf-8"))}  # fmt: skip
    rows = [row for row in read("README.md").splitlines() if re.match(r"\| (Plain|Spec|Transf|\d)", row)]
    assert len(rows) > 4
    for row in rows:
        missing = {n for n in figures(row.split("|", 2)[2])} - everywhere
        assert not missing, f"README: {missing} in {row}"
