"""The command `python -m hf_specdec.hub FOLDER`: writes a `custom_generate` repository, ready to upload."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path

import hf_specdec


def write(folder: Path) -> list[Path]:
    """Write `README.md` and `custom_generate/`, and return the paths; an existing README.md is kept.

    The folder may be that of a model, which then speculates if it is loaded with `trust_remote_code=True`.
    """
    source = files("hf_specdec.hub")
    texts = {
        "README.md": (source / "README.md").read_text(encoding="utf-8"),
        "custom_generate/generate.py": (source / "generate.py").read_text(encoding="utf-8"),
        "custom_generate/requirements.txt": f"hf_specdec>={hf_specdec.__version__}\n",
    }
    if (folder / "README.md").exists():
        del texts["README.md"]
    (folder / "custom_generate").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def main(arguments: list[str] | None = None) -> int:
    """Write the folder and print the paths; return the exit status, 1 if the folder is not writable."""
    parser = argparse.ArgumentParser(prog="python -m hf_specdec.hub", description=__doc__.split(": ", 1)[1])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if it does not exist")
    folder = parser.parse_args(arguments).folder
    try:
        written = write(folder)
    except OSError as error:
        print(
            f"{parser.prog}: error: {str(folder)!r} can't be written to ({error.strerror}); give another folder",
            file=sys.stderr,
        )
        return 1
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
