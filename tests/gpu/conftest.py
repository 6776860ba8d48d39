"""Each test's outcome is written to the file `HF_SPECDEC_GPU_REPORT` as soon as it is known, a line of JSON each."""

import json
import os

import pytest
import torch
import transformers


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test, and for one that fails before or after its call."""
    name = os.environ.get("HF_SPECDEC_GPU_REPORT")
    # Each of pytest-xdist's workers reports to the process that started it, which writes.
    if name and "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or report.outcome != "passed"):
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        line = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": report.duration,
            "error": report.longreprtext or None,
            "gpu": gpu,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        with open(name, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
