"""The script as a module, so that a test can call its `main` without a process of its own."""

import importlib.util
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "assisted_generation.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("assisted_generation", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
