"""Libraries of our own C++."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils import logging

from hf_specdec.prepared import own_code


@pytest.mark.compiles
def test_compiling_shows_progress(capsys: pytest.CaptureFixture[str]) -> None:
    logging.enable_progress_bar()
    assert own_code._compile("").is_file()
    assert "Compiling kernels: 100%" in capsys.readouterr().err


def test_what_was_compiled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code.code_on_disk, "library_for", lambda text: Path(f"{text}.so"))
    monkeypatch.setattr(own_code, "_compile", lambda text: pytest.fail("compiled again"))
    assert own_code.library_of("kernels") == Path("kernels.so")
