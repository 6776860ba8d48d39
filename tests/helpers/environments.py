"""Fresh environments for the wheel, which borrow the distributions that it asks for from the running one.

Only what pip would have installed is linked, by the requirements in the metadata, so that an extra that was not asked
for is truly missing; and nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("hf_specdec", "scripts", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def build_wheel(folder: Path) -> Path:
    """The wheel of a copy of the sources, so that nothing is left beside them."""
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, sources / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sources)]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, extras: str = "") -> Path:
    """A fresh environment with the wheel and what it requires; returns its folder of executables.

    Args:
        extras: as in `hf_specdec[extras]`.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (asked,) = metadata.distributions(path=[str(_unpacked(wheel, folder / "metadata"))])
    for name in _required(asked, set(filter(None, extras.split(",")))):
        _link(metadata.distribution(name), packages)
    python = folder / "bin" / "python"
    wanted = f"{wheel}[{extras}]" if extras else str(wheel)
    # pip itself finds all requirements met, or fails.
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", wanted]
    subprocess.run(pip, check=True)
    return folder / "bin"


def _unpacked(wheel: Path, folder: Path) -> Path:
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


def _required(asked: metadata.Distribution, extras: set[str]) -> set[str]:
    """Names of all distributions that one needs, directly or not."""
    found: set[str] = set()
    open_ones = [(asked, extras)]
    while open_ones:
        distribution, wanted = open_ones.pop()
        for line in distribution.requires or ():
            requirement = Requirement(line)
            markers = [{"extra": extra} for extra in (wanted or {""})]
            if requirement.marker is not None and not any(map(requirement.marker.evaluate, markers)):
                continue
            if requirement.name not in found or requirement.extras:
                found.add(requirement.name)
                open_ones.append((metadata.distribution(requirement.name), set(requirement.extras)))
    return found


def _link(distribution: metadata.Distribution, packages: Path) -> None:
    """Makes the top-level modules and folders of an installed distribution importable in another environment."""
    for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        place = packages / name
        if not place.exists():
            os.symlink(distribution.locate_file(name), place)
