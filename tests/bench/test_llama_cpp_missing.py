"""llama.cpp where it is not installed or can't run the pair: one clear line before any work."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import run_task


@pytest.mark.parametrize("missing", ["llama_cpp", "gguf"])
def test_a_missing_package_is_named_with_the_extra(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    settings = Settings(
        task="engines", model_name="no such model", engines=("recorded", "llama.cpp-q8_0"), output_dir=tmp_path
    )
    with pytest.raises(
        BenchError, match=rf"'llama.cpp-q8_0' needs {missing}, .* pip install 'hf_specdec\[llama-cpp\]'"
    ):
        run_task(settings)
