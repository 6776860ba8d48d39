"""The wheel in fresh environments, used from outside the checkout."""

import json
import os
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from helpers.environments import ROOT, build_wheel, install
from packaging.requirements import Requirement

pytestmark = pytest.mark.install
SHORT = ["--prompt_lengths", "40", "--max_new_tokens", "4", "--repeats", "1", "--output_dir", "out"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory) -> Path:
    """Executables of an environment with the plug-in alone."""
    return install(wheel, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def bench(wheel: Path, tmp_path_factory) -> Path:
    """Executables of an environment with the extra of the script."""
    return install(wheel, tmp_path_factory.mktemp("bench"), "bench")


def packages_of(executables: Path) -> Path:
    """Where an environment keeps its packages."""
    return next(executables.parent.glob("lib/python*/site-packages"))


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs an executable as its user would; nothing of this process's paths is handed on."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        words, cwd=folder, env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


PLUG_IN = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
import hf_specdec
from hf_specdec import embedded
target, draft = (AutoModelForCausalLM.from_pretrained(embedded.model_path(name)) for name in ("target", "draft"))
ids = torch.tensor([[1, 50, 60, 70]])
plain = target.generate(ids, max_new_tokens=12, do_sample=False)
with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
    ours = target.generate(ids, max_new_tokens=12, do_sample=False)
assert torch.equal(ours, plain) and hf_specdec.last_speculation(target).rounds
json.dump({"place": hf_specdec.__file__}, sys.stdout)
"""


def test_the_plug_in_alone_speculates(plain: Path, tmp_path) -> None:
    done = run(tmp_path, str(plain / "python"), "-c", PLUG_IN)
    assert done.returncode == 0, done.stderr
    assert Path(json.loads(done.stdout)["place"]).is_relative_to(plain.parent)


def test_the_wheel_holds_every_file_and_nothing_else(bench: Path) -> None:
    package = packages_of(bench) / "hf_specdec"
    installed = {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    source = ROOT / "hf_specdec"
    tracked = subprocess.run(["git", "ls-files", "-z", "."], cwd=source, capture_output=True, text=True, check=True)
    assert installed == {Path(name) for name in tracked.stdout.split("\0") if name}


def test_without_the_extra_the_script_names_it(plain: Path, tmp_path) -> None:
    done = run(tmp_path, str(plain / "assisted_generation.py"), "--task", "benchmark", "--assisted_generation", *SHORT)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "pip install 'hf_specdec[bench]'" in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_each_package_of_the_extra_is_missed_before_anything_is_measured(bench: Path, tmp_path) -> None:
    (about,) = metadata.distributions(name="hf_specdec", path=[str(packages_of(bench))])
    names = [Requirement(line).name for line in about.requires or () if line.endswith('extra == "bench"')]
    assert len(names) > 5
    for name in names:
        hidden = packages_of(bench) / name
        target = hidden.readlink()
        hidden.unlink()
        done = run(tmp_path, str(bench / "assisted_generation.py"), "--task", "benchmark", *SHORT)
        hidden.symlink_to(target)
        assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, name
        assert f"{name} is not installed" in done.stderr and "hf_specdec[bench]" in done.stderr


def test_help_needs_no_extra(plain: Path, tmp_path) -> None:
    done = run(tmp_path, str(plain / "assisted_generation.py"), "--help")
    assert done.returncode == 0 and "--assisted_generation" in done.stdout


def test_with_the_extra_the_script_measures(bench: Path, tmp_path) -> None:
    done = run(tmp_path, str(bench / "assisted_generation.py"), "--task", "benchmark", "--assisted_generation", *SHORT)
    assert done.returncode == 0, done.stderr
    assert "over plain decoding" in done.stdout
    assert {path.name.partition(".")[2] for path in (tmp_path / "out").iterdir()} == {"json.gz", "md", "png"}


def test_the_installed_script_can_be_imported(bench: Path, tmp_path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import assisted_generation as script;"
        "assert script.main(['--task', 'report', '--output_dir', 'nowhere']) == 1;"
        "import hf_specdec; print(hf_specdec.__file__)"
    )
    done = run(tmp_path, str(bench / "python"), "-c", code, str(bench))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(bench.parent) and "nowhere" in done.stderr
