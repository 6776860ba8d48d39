#!/usr/bin/env python
"""Measures assisted generation, or decodes prompts with it; start with `--task benchmark --assisted_generation`."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path

# In a checkout, use the package next to this folder, even if another one is installed.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "hf_specdec" / "__init__.py").is_file():
    sys.path.insert(0, str(_CHECKOUT))

from hf_specdec.bench import arguments as given  # noqa: E402
from hf_specdec.bench.settings import BenchError, Settings  # noqa: E402
from hf_specdec.bench.tasks import TASKS, run_task  # noqa: E402

# The packages of `hf_specdec[bench]`.
_PACKAGES = (
    "datasets", "evaluate", "matplotlib", "pandas", "psutil", "rouge_score", "sacrebleu", "scipy", "tabulate"
)  # fmt: skip


def task_of(arguments: list[str]) -> str:
    """The task that a command line names, benchmark by default."""
    parser = given.OneLineParser(prog=given.PROG, add_help=False, allow_abbrev=False)
    parser.add_argument("--task", choices=TASKS, default="benchmark")
    task: str = parser.parse_known_args(arguments)[0].task
    return task


def settings_of(arguments: list[str]) -> Settings:
    """The settings of a command line; ends the process with one line at a mistake."""
    task = TASKS[task_of(arguments)]
    settings = given.settings_of(task.parser(), task.defaults, arguments)
    # Not an error, so that the same command without that flag measures the target alone.
    for flag in given.unused(settings, arguments):
        print(f"{given.PROG}: {flag} is not used without --assisted_generation", file=sys.stderr)
    return settings


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; returns the exit status: 0, 1 for an error that the user can fix, 130 for Ctrl-C."""
    words = sys.argv[1:] if arguments is None else arguments
    task = task_of(words)
    try:
        given.check_text(words)
        settings = settings_of(words)
        _check_packages(task)
        _quiet()
        run_task(settings)
    except BenchError as error:
        print(f"{given.PROG}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        journaled = task not in ("tune", "report")
        goes_on = "; measurements are kept, and the same command continues" if journaled else ""
        print(f"{given.PROG}: interrupted{goes_on}", file=sys.stderr)
        return 130
    return 0


def _check_packages(task: str) -> None:
    """Before anything is measured, since some are imported only afterwards."""
    needed = () if task == "engines" else _PACKAGES  # without them `engines` writes JSON and no tables
    if missing := [name for name in needed if find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise BenchError(f"{', '.join(missing)} {verb} not installed; pip install 'hf_specdec[bench]'")


def _quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Failed connections are reported once, by the script.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)


if __name__ == "__main__":
    sys.exit(main())
