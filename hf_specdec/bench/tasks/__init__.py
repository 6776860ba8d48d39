"""The tasks of the script: the arguments of each, and the module that runs it.

A task's module has `run(settings, shared)`, which raises `BenchError` for what the user can correct, if possible before
heavy work, and `render(result)` if it measures. Arguments are declared here, so that `--help` imports neither torch nor
pandas.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from hf_specdec.bench.arguments import (
    DATA,
    ENGINES,
    LOSSLESS,
    MODELS,
    SAMPLING,
    STRATEGIC,
    TRAINING,
    WORK,
    OneLineParser,
    task_parser,
)
from hf_specdec.bench.settings import KEYWORDS, BenchError, Settings


@dataclass(frozen=True)
class Task:
    """A task's arguments.

    Args:
        description: one sentence for `--help`.
        defaults: their default values.
        names: their names, fields of `Settings`.
        several: arguments that accept several values; keywords of generate() are then crossed, see `Settings.grid`.
        help: help texts of arguments that mean something else in this task.
        shared: whether several processes may share the work.
        module: the module that runs it, if its name is another.
    """

    description: str
    defaults: Settings
    names: tuple[str, ...]
    several: tuple[str, ...] = ()
    help: Mapping[str, str] = field(default_factory=dict)
    shared: bool = False
    module: str | None = None

    def parser(self) -> OneLineParser:
        """The parser of the task's command line."""
        limit = f"examples per subtask (default: all; embedded: {self.defaults.embedded_limit})"
        help = {"limit": limit, **self.help}
        return task_parser(self.defaults, self.names, self.description, [*TASKS], several=self.several, help=help)


PROMPTS_PER_LENGTH = {"benchmark": 5, "engines": 8}
JUDGED_LIMIT = 50  # examples that a sweep uses of each embedded subtask if it judges quality


_PROMPTS = "prompts of each length, at least a batch (default: {})"
_DATASET = (
    "ask its questions instead of texts of --prompt_lengths (by default: embedded pairs get those of the embedded "
    "corpus, other models passages of a story)"
)
_DRAFTING = ("assisted_generation",)
_OF_DRAFTS = ("assistant_model", "draft_gguf_file", "draft_device", "draft_precision")
TASKS: Mapping[str, Task] = {
    "benchmark": Task(
        "Compares plain and speculative decoding and transformers' assisted generation, at fixed prompt lengths.",
        Settings(task="benchmark", max_new_tokens=30, repeats=7, prompt_lengths=(256, 512)),
        (*MODELS, *_DRAFTING, *STRATEGIC, "draft_vocabulary", *SAMPLING, "prompt_lengths", "prompts", *DATA, *WORK),
        several=("prompt_lengths",),
        help={"limit": _PROMPTS.format(PROMPTS_PER_LENGTH["benchmark"]), "dataset": _DATASET},
    ),
    "decode": Task(
        "Answers prompts one by one, shows the answers as they come, and compares the methods as benchmark does.",
        Settings(task="decode", max_new_tokens=30),
        (*MODELS, *_DRAFTING, *STRATEGIC, *SAMPLING, "prompts", *WORK),
    ),
    "subtasks": Task(
        "Compares every way of decoding on eight kinds of text, in speed and quality.",
        Settings(task="subtasks", max_new_tokens=128, repeats=7, assisted_generation=True),
        (
            *MODELS, *_DRAFTING, *LOSSLESS, "fallback_threshold", "rollback_threshold", *SAMPLING, *DATA,
            "reference_column", *WORK,
        ),
        shared=True,
    ),
    "sweep": Task(
        "Finds the best draft, draft length, thresholds and other settings: all values crossed, on the same examples.",
        Settings(task="sweep", max_new_tokens=128, repeats=7, assisted_generation=True, embedded_limit=5),
        (*MODELS, "draft_models", *_DRAFTING, *STRATEGIC, *SAMPLING, *DATA, "reference_column", *WORK),
        several=KEYWORDS,
        help={"limit": f"examples per subtask (default: all; embedded: 5, with lossy strategies {JUDGED_LIMIT})"},
        shared=True,
    ),
    "tune": Task(
        "Finds the draft, strategy, settings and engine that are fastest on your prompts, within a given time.",
        Settings(
            task="tune", max_new_tokens=128, assisted_generation=True, engines=ENGINES[1:], embedded_limit=10
        ),
        (
            *MODELS, "draft_models", *_DRAFTING, *SAMPLING, *DATA, "reference_column", "engines", "minutes",
            "max_quality_loss", *(name for name in WORK if name != "repeats"),
        ),
        several=("batch_sizes", "engines"),
    ),
    "replay": Task(
        "Predicts what each drafter would have gained on answers that the target gave before, without decoding.",
        Settings(task="replay", max_new_tokens=128, assisted_generation=True, engines=("recorded",), embedded_limit=3),
        (
            *MODELS, "num_assistant_tokens", "drafter", *SAMPLING, *DATA, "answer_column", "engines", "check",
            "pass_times", *(name for name in WORK if name != "batch_sizes"),
        ),
        several=("num_assistant_tokens", "drafter", "engines"),
        help={"limit": "answers, or examples per subtask (default: all; embedded: 3)"},
    ),
    "ablation": Task(
        "Measures what speculation, the KV cache and Better Transformer each contribute: each switched on and off.",
        Settings(task="ablation", max_new_tokens=64, repeats=7, assisted_generation=True, embedded_limit=3),
        (
            *(name for name in MODELS if name != "better_transformer"), *_DRAFTING, *STRATEGIC, *SAMPLING, *DATA, *WORK
        ),
        shared=True,
    ),
    "engines": Task(
        "Compares each engine at each batch size, without and with a draft, with the settings of transformers' own.",
        Settings(
            task="engines", max_new_tokens=128, repeats=7, prompt_lengths=(256,), batch_sizes=(1, 4, 8),
            assisted_generation=True,
        ),
        (
            *MODELS, *_DRAFTING, "num_assistant_tokens", "drafter", *SAMPLING, "prompt_lengths", "prompts", *DATA,
            "engines", *WORK,
        ),
        several=("num_assistant_tokens", "prompt_lengths", "batch_sizes", "engines"),
        help={"limit": _PROMPTS.format(PROMPTS_PER_LENGTH["engines"]), "dataset": _DATASET},
    ),
    "align": Task(
        "Fine-tunes a draft on what its target writes, and judges it on prompts that it has not seen.",
        Settings(
            task="align", max_new_tokens=128, repeats=3, assisted_generation=True, batch_sizes=(8,), embedded_limit=125
        ),
        (*MODELS, *_DRAFTING, *LOSSLESS, *SAMPLING, *DATA, *TRAINING, *WORK),
        help={"batch_sizes": "texts answered at once, and in a training step"},
        shared=True,
        module="draft",
    ),
    "draft": Task(
        "Makes a draft for a target out of some of its layers, trains it on what the target writes, and judges it.",
        Settings(
            task="draft", max_new_tokens=128, assisted_generation=True, batch_sizes=(96,), embedded_limit=125,
            dataset="own", loss="lk_hybrid", top_k_targets=32, minutes=60.0, compile=True, num_assistant_tokens="auto",
        ),
        (
            *(name for name in MODELS if name not in _OF_DRAFTS), "num_assistant_tokens", *SAMPLING, *DATA,
            "held_out", "own_prompts", "layers", "draft_vocabulary", "loss", "learning_rate", "top_k_targets",
            "minutes", *WORK,
        ),
        help={
            "batch_sizes": "texts answered at once",
            "dataset": "prompts like those that you will decode, of which some are held out to judge the draft; own: "
            "the target writes some itself",
            "draft_dtype": "dtype in which the draft is judged and saved; auto: the target's",
            "draft_vocabulary": "tokens that the draft proposes",
            "minutes": "how long answering and training may take together",
        },
    ),
    "report": Task(
        "Renders tables and pictures again from saved results, and fills the READMEs that quote them.",
        Settings(task="report"),
        ("output_dir",),
        help={"output_dir": "the folder to render"},
    ),
}  # fmt: skip


def task_module(name: str) -> Any:
    """Import a task's module; done only when it runs, since some need packages that others don't."""
    return import_module(f"hf_specdec.bench.tasks.{TASKS[name].module or name}")


def run_task(settings: Settings) -> None:
    """Run `settings.task`; raise `BenchError` for what the user can correct."""
    import torch

    from hf_specdec.bench import results
    from hf_specdec.bench.models.names import stem
    from hf_specdec.bench.running.processes import processes

    task = task_module(settings.task)
    # Before any model is loaded, so that each process of several gets its own GPU.
    shared = processes(cpu=settings.device == "cpu" or not torch.cuda.is_available())
    if shared.count > 1 and not TASKS[settings.task].shared:
        raise BenchError(
            f"--task: {settings.task!r} runs in one process only, but {shared.count} were started; start it without "
            f"torchrun, or choose one of {', '.join(name for name, one in TASKS.items() if one.shared)}"
        )
    if settings.task != "report":
        # Drafts are judged one text at a time, whatever they are trained with.
        results.check_output(task.judging(settings) if settings.task in ("align", "draft") else settings)
    task.run(settings, shared)
    shared.end()
    if shared.main and settings.task != "report":
        print(f"Files of this run: {settings.output_dir / stem(settings)}.*", file=sys.stderr)
