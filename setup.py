"""Packaging: `pip install .` also puts `assisted_generation.py` on PATH."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "hf_specdec" / "__init__.py").read_text(encoding="utf-8"))
README = HERE / "README.md"

setup(
    name="hf_specdec",
    version=VERSION[1] if VERSION else None,
    description="Speculative and BiLD decoding under Hugging Face model.generate(assistant_model=...)",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0 AND PSF-2.0",  # PSF-2.0: bench/inputs/code_edits.jsonl
    python_requires=">=3.10",
    packages=find_packages(include=["hf_specdec", "hf_specdec.*"]),
    package_data={
        "hf_specdec": [
            "py.typed",
            "bench/inputs/*.txt",
            "bench/inputs/*.jsonl",
            "prepared/kernels/*.cpp",
            "prepared/kernels/*.h",
            "hub/README.md",
            "embedded/models/**/*",
        ],
    },
    scripts=["scripts/assisted_generation.py"],
    # `compile=True` on a CPU takes torch 2.13, whose stable C++ interface its kernels use. With an older one a warning
    # says so, and decoding goes on uncompiled, with the same tokens.
    install_requires=["filelock", "torch>=2.6", "transformers>=5.17,<6", "tqdm"],
    extras_require={
        "bench": [
            "datasets",
            "evaluate>=0.4.6",
            "matplotlib",
            "pandas",
            "psutil",
            "rouge_score",
            "sacrebleu>=2.4",
            "scipy>=1.15",
            "tabulate",
        ],
        "align": ["accelerate>=1.2", "peft"],
        "precision": ["accelerate", "optimum-quanto>=0.2.7"],
        "gguf": ["accelerate>=1.2", "gguf>=0.19"],
        "llama-cpp": ["llama-cpp-python>=0.3.36,<0.4", "gguf>=0.19"],
        "dev": [
            "fastapi",
            "hypothesis",
            "import-linter",
            "mypy",
            "openai",
            "peft",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "triton; platform_system == 'Linux'",
            "uvicorn",
            "xgrammar",
        ],
    },
)
