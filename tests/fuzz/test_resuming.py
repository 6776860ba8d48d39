"""`make fuzz` goes on behind the last chunk that was finished."""

import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_a_stopped_run_goes_on(tmp_path) -> None:
    shutil.copy(MAKEFILE, tmp_path)
    (tmp_path / "requirements.txt").touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").touch()
    log, stops = tmp_path / "log", tmp_path / "stops"
    # In place of pytest; its last argument is the seed.
    log_call = f'for seed; do :; done; echo "$HF_SPECDEC_FUZZ_CASES ${{seed#*=}}" >> {log}; test ! -e {stops}'
    (tmp_path / "pytest.sh").write_text(log_call)

    def fuzz(cases: int) -> tuple[int, list[list[int]]]:
        log.unlink(missing_ok=True)
        command = ["make", "fuzz", f"CASES={cases}", "RUN=sh pytest.sh"]
        status = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode
        return status, [[int(word) for word in line.split()] for line in log.read_text().splitlines()]

    status, calls = fuzz(600)
    first = calls[0][1]
    assert (status, calls) == (0, [[250, first], [250, first + 1], [100, first + 2]])
    assert not (tmp_path / ".hypothesis" / "fuzz").exists()

    (tmp_path / ".hypothesis" / "fuzz").write_text(f"{first}\n{first}\n")
    stops.touch()
    assert fuzz(600) == (2, [[250, first + 1]])
    stops.unlink()
    assert fuzz(600) == (0, [[250, first + 1], [100, first + 2]])
    (tmp_path / ".hypothesis" / "fuzz").write_text("7\n")
    assert fuzz(250) == (0, [[250, 7]])
