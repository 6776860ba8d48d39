"""What importing the package loads and changes, seen in a process of its own, as this one has loaded everything."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import json, sys
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.generation import CandidateGenerator
facts, loaded = {}, set(sys.modules)
before = dict(vars(GenerationMixin))
import hf_specdec
facts["changed"] = [dict(vars(GenerationMixin)) != before]
hf_specdec.enable()
facts["package"] = sorted(set(sys.modules) - loaded)
facts["changed"].append(dict(vars(GenerationMixin)) != before)
hf_specdec.disable()
facts["changed"].append(dict(vars(GenerationMixin)) != before)
facts["late"] = str(hf_specdec.to_better_transformer)
import hf_specdec.bench.figures.quality
facts["quality"] = sorted(sys.modules)
for name in ("datasets", "evaluate", "matplotlib", "pandas", "psutil", "rouge_score", "sacrebleu", "scipy", "tabulate"):
    sys.modules[name] = None
for name in [name for name in sys.modules if name.startswith("hf_specdec.bench")]:
    del sys.modules[name]
import hf_specdec.bench.tasks.engines
from hf_specdec.bench.environment import busy_cores
from hf_specdec.bench.reports.document import document
facts["without"] = [document(None, "", None)[0], busy_cores()]
json.dump(facts, sys.stdout)
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_only_enable_patches_transformers_and_disable_undoes_it(facts: dict[str, Any]) -> None:
    assert facts["changed"] == [False, True, False]


def test_the_package_loads_nothing_that_transformers_has_not_loaded(facts: dict[str, Any]) -> None:
    assert "hf_specdec.decoding" in facts["package"]
    assert {name.split(".")[0] for name in facts["package"]} == {"hf_specdec"}
    assert "hf_specdec.bench" not in facts["package"]


def test_settings_are_known_without_torch() -> None:
    code = "import sys, hf_specdec.config; assert not {'torch', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_better_transformer_is_exported_and_imported_late(facts: dict[str, Any]) -> None:
    assert "hf_specdec.models.better_transformer" not in facts["package"]
    assert facts["late"].startswith("<function to_better_transformer")


def test_scores_do_not_wait_for_evaluate(facts: dict[str, Any]) -> None:
    assert "hf_specdec.bench.figures.quality" in facts["quality"]
    assert not {"evaluate", "datasets"} & set(facts["quality"])


def test_engines_are_measured_without_the_packages_of_the_other_tasks(facts: dict[str, Any]) -> None:
    line, busy = facts["without"]
    assert line.count("\n") == 1 and "pandas and scipy and tabulate not installed" in line
    assert "hf_specdec[bench]" in line and busy is None
