"""Known targets and their drafts, short names for both, and the names of a run's files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_specdec
from hf_specdec import embedded
from hf_specdec.bench.settings import Settings


@dataclass(frozen=True)
class Pair:
    """A target and its drafts, by full hub name (or embedded name); the first draft is the default."""

    target: str
    drafts: tuple[str, ...]


_NEOX = "u-hyszk/japanese-gpt-neox-{}-xlsum-sft"

KNOWN_PAIRS = (
    Pair("target", ("draft", "draft-small", "draft-large")),
    Pair("t5-target", ("t5-draft",)),
    Pair("Qwen/Qwen1.5-7B-Chat", ("Qwen/Qwen1.5-0.5B-Chat",)),
    Pair("Qwen/Qwen2-7B-Instruct", ("Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen2-1.5B-Instruct")),
    Pair(
        "Qwen/Qwen2.5-7B-Instruct",
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct"),
    ),
    Pair(
        "Qwen/Qwen2.5-14B-Instruct",
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct"),
    ),
    Pair("Qwen/Qwen3-8B", ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B")),
    Pair("Qwen/Qwen3-14B", ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B")),
    Pair("meta-llama/Llama-3.1-8B-Instruct", ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct")),
    Pair("google/gemma-2-9b-it", ("google/gemma-2-2b-it",)),
    Pair("google/gemma-3-12b-it", ("google/gemma-3-1b-it", "google/gemma-3-4b-it")),
    Pair(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    ),
    Pair(
        "facebook/opt-6.7b",
        ("facebook/opt-125m", "facebook/opt-350m", "facebook/opt-1.3b", "facebook/opt-2.7b"),
    ),
    Pair("lmsys/vicuna-7b-v1.3", ("double7/vicuna-68m", "Jiayi-Pan/Tiny-Vicuna-1B")),
    Pair("bigscience/bloom-7b1", ("bigscience/bloom-560m", "bigscience/bloom-1b7")),
    Pair("meta-llama/Llama-2-7b-hf", ("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",)),
    Pair("google-t5/t5-base", ("google-t5/t5-small",)),
    # Speech; these drafts read the target's encoding, so each fits one target only.
    Pair("openai/whisper-large-v3", ("distil-whisper/distil-large-v3",)),
    Pair("openai/whisper-large-v2", ("distil-whisper/distil-large-v2",)),
    Pair("openai/whisper-medium.en", ("distil-whisper/distil-medium.en",)),
    Pair("openai/whisper-small.en", ("distil-whisper/distil-small.en",)),
    # 29M is the fastest of the published ones.
    Pair(
        _NEOX.format("409M"),
        tuple(_NEOX.format(size) for size in ("29M", "6M", "13M", "47M", "72M", "115M", "165M", "247M")),
    ),
)

# Common names for models whose hub name has a suffix.
_NICKNAMES = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
}


WHERE = "pretrained_model_name_or_path"

# The models that `make real` downloads, by the names of their folders.
REAL_MODELS = ("smollm2-135m-instruct", "gemma-3-270m", "whisper-base")


def real_models_folder() -> Path:
    """`.models` at the root of a checkout, or in the working directory if there is no checkout."""
    root = Path(hf_specdec.__file__).parents[1]
    return (root if (root / "Makefile").is_file() else Path()) / ".models"


def short_name(name: str) -> str:
    """The last part of a model's name or path."""
    return name.rstrip("/").rsplit("/", 1)[-1]


def full_name(name: str) -> str:
    """Resolve `name` to a folder, GGUF file, embedded name or hub name.

    A folder that holds a model comes first, then the embedded models, those that `make real` has downloaded, and the
    table (by name without organisation, ignoring case); anything else is assumed to be a hub name and returned
    unchanged.
    """
    if is_gguf(name):
        return name
    if (Path(name) / "config.json").is_file():
        # Distinguishes the folder from an embedded model of that name.
        return f"./{name}" if name in embedded.names() else name
    short = short_name(name).lower()
    if name in embedded.names() or "/" in name:
        return name
    if short in REAL_MODELS and (real_models_folder() / short / "config.json").is_file():
        return short
    if short in _NICKNAMES:
        return _NICKNAMES[short]
    return next((known for known in _hub_names() if short_name(known).lower() == short), name)


def location(name: str) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a full name, which may end with a GGUF file, local or on the hub."""
    if name in embedded.names():
        return {WHERE: embedded.model_path(name)}
    if name in REAL_MODELS:
        return {WHERE: real_models_folder() / name}
    if not is_gguf(name):
        return {WHERE: name}
    folder, _, file = name.rpartition("/")
    if not Path(name).is_file() and name.count("/") > 1:  # OWNER/NAME/FILE, where FILE may include folders
        owner, repository, file = name.split("/", 2)
        folder = f"{owner}/{repository}"
    return {WHERE: folder or ".", "gguf_file": file}


def is_gguf(name: str) -> bool:
    """Whether a model's name ends with a GGUF file."""
    return name.endswith(".gguf")


def default_draft(target: str) -> str | None:
    """The default draft of a target under any of its names; None for a target that is not in the table."""
    return next(iter(known_drafts(target)), None)


def known_drafts(target: str) -> tuple[str, ...]:
    """All drafts of a target under any of its names; empty for a target that is not in the table."""
    name = full_name(target)
    for pair in KNOWN_PAIRS:
        # Only the last part of the name is compared, so that folders and mirrors of a known model keep its drafts. A
        # folder that has an embedded model's name is not that model.
        same = short_name(pair.target).lower() == short_name(name).lower()
        if name == pair.target or (same and "/" in pair.target):
            return pair.drafts
    return ()


def stem(settings: Settings) -> str:
    """The name of a run's files, without suffix.

    `<task>-<target>[-<draft>][-<precision>][-draft_<precision>]-<strategy, or data set and split>-<greedy|sampling>`,
    so that a folder can hold several pairs, precisions and data sets. A sweep's drafts are named if they were given,
    the draft's precision if it differs from the target's.
    """
    parts = [settings.task, full_name(settings.model_name)]
    drafts = settings.draft_models or ((settings.assistant_model,) if settings.assistant_model else ())
    if not drafts and settings.task not in ("sweep", "tune") and (known := default_draft(settings.model_name)):
        drafts = (known,)
    if settings.uses_draft:
        parts += [full_name(name) for name in drafts]
    parts += [kind for kind in (settings.precision, settings.dtype) if kind not in (None, "auto", "float32")]
    if settings.assisted_generation:
        kinds = (settings.draft_precision, settings.draft_dtype)
        parts += [f"draft_{kind}" for kind in kinds if kind not in (None, "auto", settings.dtype)]
    if settings.task in ("benchmark", "decode"):
        parts += [f"head_of_{settings.draft_vocabulary}"] if settings.draft_vocabulary else []
        parts.append(settings.generation_strategy if settings.assisted_generation else "plain")
    if settings.task not in ("benchmark", "decode", "engines") or settings.dataset != "embedded":
        parts.append(settings.dataset)
    parts += [] if settings.split is None else [settings.split]
    parts.append("sampling" if settings.sampling else "greedy")
    return "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", short_name(part)) for part in parts)


def _hub_names() -> list[str]:
    names = [name for pair in KNOWN_PAIRS for name in (pair.target, *pair.drafts)]
    return [name for name in names if "/" in name]
