"""The README tells the truth: its code runs, its file map is whole, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import hf_specdec

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_quick_start_runs(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    code = "\n".join(blocks[:2])
    assert len([line for line in blocks[1].splitlines() if line]) <= 6, "five lines and an import"
    names: dict = {}
    try:
        exec(compile(code, "README.md", "exec"), names)
    finally:
        hf_specdec.disable()
    assert names["out"].speculation.accepted > 0
    assert capsys.readouterr().out.strip()


def test_the_file_map_names_every_module_and_nothing_else() -> None:
    listing = README.split("## Files")[1]
    named = set(re.findall(r"^\s*([\w./-]+\.(?:py|md|toml|txt)|Makefile|LICENSE)\s", listing, flags=re.MULTILINE))
    assert named, "the map is a code block with one file a line"
    tracked = {path.name for folder in ("hf_specdec", "scripts") for path in (ROOT / folder).rglob("*.py")}
    missing = {name for name in tracked if name != "__init__.py"} - {Path(name).name for name in named}
    assert not missing
    gone = {name for name in named if not list(ROOT.rglob(Path(name).name))}
    assert not gone


def test_the_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert f"\n{command}:" in makefile
