"""Train the embedded models and write them into the package; the script's task `subtasks` shows how good they are.

    python -m hf_specdec.embedded.train                  # all six models
    python -m hf_specdec.embedded.train --only draft     # some of them

A GPU is used if there is one, and takes minutes. Two CPU cores take under two hours, in two processes:

    OMP_NUM_THREADS=1 python -m hf_specdec.embedded.train --only target &
    OMP_NUM_THREADS=1 python -m hf_specdec.embedded.train --only draft-small draft draft-large t5-draft t5-target

When it is started again after an interruption, it continues from the last checkpoint in `--work_dir`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_specdec.embedded import MODELS_DIR, model_path, names
from hf_specdec.embedded.architectures import SHAPES, Shape
from hf_specdec.embedded.tokenization import train_tokenizer
from hf_specdec.embedded.training import Recipe, train

SEED = 0
# The last stage of the shipped target was trained on the corpus as it is. All that came before (its earlier stages, the
# other models, the tokenizer) saw three people in the texts of qa and multi-turn, and four passages of one kind in rag.
_DRAFT = Recipe(SHAPES["draft"], steps=450, seed=SEED)
# The target starts as its draft, with one layer. It grows to three layers, and from there to all nine.
_TARGET_SHALLOW = Shape(192, 512, 3)
_TARGET_SEEDLING = Recipe(
    _TARGET_SHALLOW, steps=4000, rows=8, muon_lr=0.007, adam_lr=1.5e-3, decay=0.5, seed=SEED + 2,
    seedling=Recipe(
        _TARGET_SHALLOW, steps=900, until=300, rows=8, muon_lr=0.006, adam_lr=1.5e-3, decay=0.8, seed=SEED + 1,
        seedling=_DRAFT,
    ),
)  # fmt: skip
# The T5 target learns with two layers; the other layers, and long prompts, come last. With the learning rates of the
# decoder-only drafts, T5 models don't learn to copy.
_T5_SEEDLING = Recipe(
    Shape(160, 448, 2, encoder_layers=2), steps=1800, rows=8, muon_lr=0.01, adam_lr=3e-3, decay=0.44, seed=SEED
)
_TARGET_LOOK_UP = Recipe(
    _TARGET_SHALLOW, steps=2300, rows=8, muon_lr=0.006, adam_lr=1.2e-3, decay=0.8, seed=SEED + 5,
    emphasis=("qa", "rag", "multi-turn", "law analytics"), seedling=_TARGET_SEEDLING,
)  # fmt: skip
_TARGET_GROWN = Recipe(
    SHAPES["target"], steps=200, rows=8, muon_lr=0.006, adam_lr=1e-3, decay=1.0, seed=SEED + 3,
    seedling=_TARGET_LOOK_UP,
)  # fmt: skip
_TARGET_COPYING = Recipe(
    SHAPES["target"], steps=2700, rows=8, muon_lr=0.006, adam_lr=1e-3, decay=0.75, seed=SEED + 6,
    emphasis=("rag", "law analytics", "multi-turn", "rag", "law analytics"), seedling=_TARGET_GROWN,
)  # fmt: skip
_TARGET_LOOK_UPS = Recipe(
    SHAPES["target"], steps=160, rows=4, muon_lr=0.004, adam_lr=7e-4, warmup=10, decay=1.0, seed=SEED + 7,
    checkpoint_every=20, emphasis=2 * ("qa", "multi-turn", "rag") + ("grammar correction",), prompt_weight=0.0,
    whole=True, seedling=_TARGET_COPYING,
)  # fmt: skip
RECIPES: dict[str, Recipe] = {
    "target": Recipe(
        SHAPES["target"], steps=300, rows=4, muon_lr=0.004, adam_lr=7e-4, warmup=10, decay=1.0, seed=SEED + 8,
        emphasis=2 * ("rag", "grammar correction") + ("summarization",), prompt_weight=0.0, whole=True,
        seedling=_TARGET_LOOK_UPS,
    ),
    "draft-small": Recipe(SHAPES["draft-small"], steps=400, seed=SEED),
    "draft": _DRAFT,
    "draft-large": Recipe(SHAPES["draft-large"], steps=1500, rows=8, muon_lr=0.015, adam_lr=3e-3, decay=0.8, seed=SEED),
    "t5-target": Recipe(
        SHAPES["t5-target"], steps=260, rows=8, muon_lr=0.004, adam_lr=1e-3, warmup=10, decay=1.0, seed=SEED + 1,
        emphasis=("summarization", "math_reasoning", "law analytics", "grammar correction"), few_shot=True,
        seedling=_T5_SEEDLING,
    ),
    "t5-draft": Recipe(SHAPES["t5-draft"], steps=540, rows=8, muon_lr=0.01, adam_lr=3e-3, seed=SEED, few_shot=True),
}  # fmt: skip
_DEFAULT_WORK_DIR = MODELS_DIR.parents[2] / "build" / "embedded"


def prepared_tokenizer(work_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that the package's models share. If there are none yet, that of `work_dir`, trained if need be."""
    if (model_path("target") / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(model_path("target"))
    folder = work_dir / "tokenizer"
    if not folder.exists():
        own = work_dir / f"tokenizer-{os.getpid()}"
        train_tokenizer(SEED).save_pretrained(own)
        try:
            own.rename(folder)
        except OSError:  # another process was faster; its tokenizer is the same
            shutil.rmtree(own)
    return AutoTokenizer.from_pretrained(folder)


def train_and_save(name: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, work_dir: Path) -> None:
    """Train one model and write it, with its tokenizer and `training.json`.

    Weights are stored in float16 to save space. The configuration says float32, which is faster on CPUs.
    """
    model, record = train(name, recipe, tokenizer, work_dir)
    folder = model_path(name)
    model.half().save_pretrained(folder)
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    facts = {"record": record, "recipe": asdict(recipe), "versions": versions}
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Train and write the models that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="hf_specdec.embedded.train"
    )
    parser.add_argument("--work_dir", type=Path, default=_DEFAULT_WORK_DIR,
                        help="where checkpoints are kept (default: %(default)s)")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=names(), default=list(names()), metavar="NAME",
                        help=f"models to train: {', '.join(names())} (default: all)")  # fmt: skip
    arguments = parser.parse_args(argv)
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = prepared_tokenizer(arguments.work_dir)
    for name in arguments.only:
        train_and_save(name, RECIPES[name], tokenizer, arguments.work_dir)


if __name__ == "__main__":
    main()
