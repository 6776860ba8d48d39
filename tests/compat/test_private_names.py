"""Names that other libraries do not promise to keep are used in `compat` only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import hf_specdec

PACKAGE = Path(hf_specdec.__file__).parent
# Operations of ATen are named with an underscore where they check less; what Python has has no other name.
ALLOWED = {"aten._unsafe_view", "argparse._ArgumentGroup", "sys._getframe"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(code: str) -> Iterator[str]:
    """The private names that some code reads of modules and objects, without those that it defines itself."""
    tree = ast.parse(code)
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and not _is_self(node.value) and node.attr not in own:
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"{node.module}: {name}" for name in names if private(name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and private(str(name.value)):
                yield ast.unparse(node)


def _is_self(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "cls", "super()")


def test_private_names_of_other_libraries_are_used_in_compat_only() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if "compat" not in path.relative_to(PACKAGE).parts]
    assert len(files) > 100
    found = {(str(path.relative_to(PACKAGE)), name) for path in files for name in private_names(path.read_text())}
    assert {(path, name) for path, name in found if name not in ALLOWED} == set()


def test_the_search_finds_them() -> None:
    code = "from torch._inductor import config\nmodel._secret\ngetattr(model, '_hidden')\nself._own\nother._own\n"
    assert set(private_names(code)) == {"torch._inductor: _inductor", "model._secret", "getattr(model, '_hidden')"}
