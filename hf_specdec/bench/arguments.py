"""The arguments of the script, each defined once; a task chooses among them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from hf_specdec.bench.settings import KEYWORDS, BenchError, Settings
from hf_specdec.config import DRAFTERS, SETTINGS, STRATEGIES, STRATEGY_SETTINGS, VERIFICATIONS

PROG = "assisted_generation.py"
ENGINES = ("eager", "recorded", "static", "compiled")
LLAMA_CPP = ("llama.cpp-f32", "llama.cpp-bf16", "llama.cpp-q8_0", "llama.cpp-gguf")
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_LOSSES = ("cross_entropy", "forward_kl", "reverse_kl", "total_variation", "lk_hybrid")


def at_least(least: int, otherwise: str = "") -> Callable[[str], int]:
    """Return a parser of integers of at least `least`."""

    def parse(text: str) -> int:
        """The integer, or an error for argparse."""
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {least}{otherwise}")
        return value

    return parse


def between(least: float | None, most: float | None, *, above: bool = False) -> Callable[[str], float]:
    """Return a parser of numbers from `least` to `most`; with `above`, greater than `least`."""
    low = least if least is not None else float("-inf")
    wanted = f"above {low:g}" if above else f"of at least {low:g}" if most is None else f"from {low:g} to {most:g}"

    def parse(text: str) -> float:
        """The number, or an error for argparse."""
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        # nan fails this comparison too.
        if not (value >= low and (most is None or value <= most)) or (above and value == low):
            raise argparse.ArgumentTypeError(f"{text!r} must be a number {wanted}")
        return value

    return parse


def _lookahead(text: str) -> int | str:
    return text if text == "auto" else at_least(1, " or auto")(text)


def _template(text: str) -> str:
    if "{prompt}" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} must contain {{prompt}}, the place of the prompt")
    return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} must be a JSON object, such as {{"name": true}}')
    return value


def _argument(text: str, *aliases: str, **more: Any) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    return text, aliases, more


def _setting(name: str, *aliases: str, **more: Any) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """A setting of `SpeculationConfig`, with its help and range."""
    setting = SETTINGS[name]
    return _argument(setting.help, *aliases, **{"type": between(setting.least, setting.most), **more})


_GROUPS: Mapping[str, Mapping[str, tuple[str, tuple[str, ...], dict[str, Any]]]] = {
    "models": {
        "model_name": _argument(
            "target: hub name, folder, GGUF file (on the hub: OWNER/NAME/FILE.gguf), short name of a known pair, "
            "embedded model, smollm2-135m-instruct or gemma-3-270m (see `make real`), or random weights: "
            "synthetic:SHAPE[:alpha=A][:draft=WIDTHxLAYERS | :c=C], with SHAPE smollm-135m, qwen2-0.5b, "
            "tinyllama-1.1b, llama-2-7b, qwen2-7b, opt-6.7b or falcon-h1-0.5b, A the acceptance and C the draft's "
            "cost (0.8, 0.05)",
            "--target_model_name", metavar="NAME",
        ),
        "assistant_model": _argument(
            "draft model; default: the one known for the target", "--approx_model_name", metavar="NAME"
        ),
        "gguf_file": _argument("a GGUF file of --model_name, instead of its other weights", metavar="FILE"),
        "draft_gguf_file": _argument("a GGUF file of --assistant_model", metavar="FILE"),
        "draft_models": _argument(
            "drafts to compare; default: --assistant_model, or all that are known", nargs="+", metavar="NAME"
        ),
        "chat_template_kwargs": _argument(
            """arguments of the chat template: '{"enable_thinking": false}'""", type=_json_object, metavar="JSON"
        ),
        "allow_pickle": _argument("also read weights from pytorch_model.bin, if a model has no safetensors"),
        "better_transformer": _argument("use SDPA attention (hf_specdec.to_better_transformer)"),
    },
    "precision and placement": {
        "device": _argument("device of the target: cpu, cuda:0; default: a GPU if there is one", metavar="DEVICE"),
        "draft_device": _argument("device of the draft; default: the target's", metavar="DEVICE"),
        "dtype": _argument("dtype of the target; auto: from its configuration", choices=_DTYPES),
        "draft_dtype": _argument("dtype of the draft; auto: as --dtype", choices=_DTYPES),
        "precision": _argument(
            "quantize the target's weights with optimum-quanto; gguf: keep a GGUF file's own quantization",
            choices=("int8", "int4", "gguf"),
        ),
        "draft_precision": _argument("the same for the draft", choices=("int8", "int4", "gguf")),
        "device_map": _argument("auto: spread the target over all devices with accelerate", metavar="MAP"),
        "offload_folder": _argument(
            "with --device_map: folder for weights that fit on no device", type=Path, metavar="DIR"
        ),
    },
    "speculation": {
        "assisted_generation": _argument("decode with a draft, and compare with plain decoding"),
        "generation_strategy": _argument(SETTINGS["strategy"].help, choices=STRATEGIES),
        "num_assistant_tokens": _setting(
            "num_assistant_tokens", "--gamma", "--n_lookahead", type=_lookahead, metavar="N"
        ),
        "fallback_threshold": _setting("fallback_threshold", "--fallback_thres", metavar="P"),
        "rollback_threshold": _setting("rollback_threshold", "--rollback_thres", metavar="D"),
        "lenience": _setting("lenience", metavar="L"),
        "posterior_threshold": _setting("posterior_threshold", metavar="E"),
        "assistant_ensemble_weight": _setting("assistant_ensemble_weight", metavar="W"),
        "drafter": _setting("drafter", type=None, choices=DRAFTERS),
        "verification": _setting("verification", type=None, choices=VERIFICATIONS),
        "entropy_threshold": _setting("entropy_threshold", metavar="P"),
        "compile": _argument("compile the rounds of our methods"),
        "cache_implementation": _argument("cache of our methods", choices=("dynamic", "static")),
        "draft_vocabulary": _argument(
            "compare with a draft that proposes only the N most frequent tokens", type=at_least(1), metavar="N"
        ),
    },
    "sampling, with --do_sample": {
        "do_sample": _argument("sample tokens instead of taking the most likely one"),
        "temperature": _argument(
            "0 is greedy decoding; default, also for the next two: the model's generation_config.json",
            type=between(0, None), metavar="T",
        ),
        "top_k": _argument("sample from the K most likely tokens; 0: from all", type=at_least(0), metavar="K"),
        "top_p": _argument(
            "sample from the most likely tokens whose probabilities add up to P", type=between(0, 1), metavar="P"
        ),
        "seed": _argument("seed of samples, of synthetic weights and of training", type=at_least(0), metavar="N"),
    },
    "data sets": {
        "dataset": _argument(
            "embedded, spec_bench, one subtask of them (embedded:qa, spec_bench:qa), a local file, or a data set on "
            "the hub as NAME[:CONFIG]",
            metavar="NAME",
        ),
        "dataset_path": _argument("Spec-Bench's question.jsonl", type=Path, metavar="FILE"),
        "split": _argument(
            "split of the data; embedded: train or heldout (heldout); data sets from the hub: any of theirs (test)",
            metavar="NAME",
        ),
        "prompt_column": _argument(
            "column of the prompts; a dot addresses a nested one: translation.de", metavar="COLUMN"
        ),
        "answer_column": _argument(
            "column of the target's logged answers; default: it answers now", metavar="COLUMN"
        ),
        "reference_column": _argument("column of the reference answers, for quality", metavar="COLUMN"),
        "prompt_template": _argument(
            "text around each prompt, whose place is {prompt}", type=_template, metavar="TEXT"
        ),
        "limit": _argument("examples per subtask, or prompts of each length", type=at_least(1), metavar="N"),
    },
    "training": {
        "held_out": _argument(
            "share of a data set without a split for it that only judges, at most 64 dialogues (0.1)",
            type=between(0, 1, above=True), metavar="P",
        ),
        "loss": _argument("training loss", choices=_LOSSES),
        "steps": _argument(
            "steps of --batch_size texts; default: 5 epochs, at least 300", type=at_least(1), metavar="N"
        ),
        "learning_rate": _argument(
            "peak; default: 1e-4 to 4e-3, by the draft's size", type=between(0, None, above=True), metavar="R"
        ),
        "top_k_targets": _argument(
            "store the target's K most likely tokens with its answers, so that training doesn't run the target",
            type=at_least(1), metavar="K",
        ),
        "own_prompts": _argument("learn from prompts that the target writes itself; --dataset is only for judging"),
        "layers": _argument(
            "the target's layers to make the draft from, counted from 0 (default: some choices are tried)",
            type=at_least(0), nargs="+", metavar="N",
        ),
        "lora_rank": _argument(
            "train LoRA matrices of this rank, then merge them", type=at_least(1), metavar="R"
        ),
        "on_policy": _argument(
            "share of the steps in which the draft writes the answers and the target judges them",
            type=between(0, 1), metavar="P",
        ),
    },
    "work and output": {
        "max_new_tokens": _argument("new tokens per answer at most", "--max_tokens", type=at_least(1), metavar="N"),
        "prompt_lengths": _argument("prompt lengths in tokens", type=at_least(1), nargs="+", metavar="N"),
        "batch_sizes": _argument("texts decoded at once", "--batch_sizes", type=at_least(1), metavar="N"),
        "engines": _argument(
            f"some of {', '.join(ENGINES + LLAMA_CPP)}", nargs="+", choices=ENGINES + LLAMA_CPP, metavar="NAME"
        ),
        "minutes": _argument("how long it may take", type=between(0, None, above=True), metavar="M"),
        "max_quality_loss": _argument(
            "also try BiLD, with at most this loss of quality; default: lossless methods only",
            type=between(0, 100), metavar="POINTS",
        ),
        "prompts": _argument(
            "the prompt; give it several times for several prompts", action="append", metavar="TEXT"
        ),
        "check": _argument("also decode, and compare what was predicted with what is measured"),
        "pass_times": _argument(
            "milliseconds of the target's passes by number of tokens, and of a draft step, instead of timing them: "
            """'{"target": {"1": 20, "5": 24}, "draft": 4}'""",
            type=_json_object, metavar="JSON",
        ),
        "repeats": _argument("how often each measurement is repeated", type=at_least(1), metavar="N"),
        "output_dir": _argument("where JSON, markdown and pictures go", type=Path, metavar="DIR"),
    },
}  # fmt: skip

MODELS = (
    "model_name", "assistant_model", "gguf_file", "draft_gguf_file", "chat_template_kwargs", "allow_pickle",
    "better_transformer", *_GROUPS["precision and placement"]
)  # fmt: skip
SAMPLING = tuple(_GROUPS["sampling, with --do_sample"])
STRATEGIC = ("generation_strategy", *KEYWORDS)
# Arguments that apply to every lossless method.
LOSSLESS = tuple(name for name in KEYWORDS if not any(name in own for own in STRATEGY_SETTINGS.values()))
DATA = ("dataset", "dataset_path", "split", "prompt_column", "prompt_template", "limit")
TRAINING = tuple(name for name in _GROUPS["training"] if name not in ("own_prompts", "layers"))
WORK = ("max_new_tokens", "batch_sizes", "repeats", "output_dir")
# Help and messages show these by an alias.
_SHOWN = {"batch_sizes": "batch_size", "prompts": "prompt"}


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def task_parser(
    defaults: Settings,
    names: Sequence[str],
    description: str,
    tasks: Sequence[str],
    *,
    several: Sequence[str] = (),
    help: Mapping[str, str] | None = None,
) -> OneLineParser:
    """The parser of a task.

    Args:
        defaults: the task's default values, which the help shows.
        names: the task's arguments, fields of `Settings`.
        tasks: the names of all tasks.
        several: arguments that accept several values; keywords of generate() are then crossed, see `Settings.grid`.
        help: help texts of arguments that mean something else in this task.
    """
    parser = OneLineParser(
        prog=f"{PROG}", description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--task", choices=tasks, help=f"what to do (now: {defaults.task}); each has its own --help")
    for title, group in _GROUPS.items():
        chosen = [name for name in group if name in names]
        section = parser.add_argument_group(title) if chosen else None
        for name in chosen:
            text, aliases, more = group[name]
            assert section is not None
            _add(section, name, aliases, {**more, "help": (help or {}).get(name, text)}, defaults, name in several)
    return parser


def _add(
    group: argparse._ArgumentGroup,
    name: str,
    aliases: Sequence[str],
    more: dict[str, Any],
    defaults: Settings,
    several: bool,
) -> None:
    default = getattr(defaults, name)
    flags = [f"--{_SHOWN.get(name, name)}", *aliases]
    keywords = {key: value for key, value in more.items() if value is not None}
    if isinstance(default, bool):
        keywords |= {"nargs": "*", "choices": ("no", "yes")} if several else {"action": "store_true"}
    elif several:
        keywords["nargs"] = "+"
    if isinstance(default, tuple) and default:
        keywords["help"] += f" ({' '.join(map(str, default))})"
    elif default is not None and not isinstance(default, (bool, tuple, Mapping)):
        keywords["help"] += f" ({default})".replace("%", "%%")
    group.add_argument(*flags, dest=name, **keywords)


def settings_of(parser: OneLineParser, defaults: Settings, arguments: Sequence[str]) -> Settings:
    """Parse a command line into settings; exit with an error for an argument that has no effect with the others."""
    given = vars(parser.parse_args(arguments))
    given.pop("task", None)
    grid: dict[str, tuple[Any, ...]] = {}
    for name, value in list(given.items()):
        if not isinstance(value, list):
            given[name] = (value,) if name == "batch_sizes" else value
            continue
        if name == "compile":
            value = [one == "yes" for one in value] or [True]
        if name in KEYWORDS:
            del given[name]
            grid[name] = tuple(value)
        else:
            given[name] = tuple(value)
    for name, file in (("model_name", "gguf_file"), ("assistant_model", "draft_gguf_file")):
        if file in given:
            if name not in given:
                parser.error(f"argument --{file}: is for --{name}")
            given[name] = f"{given[name].rstrip('/')}/{given.pop(file)}"
    settings = replace(defaults, **given, grid=grid)
    _check(parser, settings, {*given, *grid})
    return settings


def _check(parser: OneLineParser, settings: Settings, given: set[str]) -> None:
    greedy, synthetic = not settings.do_sample, settings.model_name.startswith("synthetic:")
    for name in given & {"top_k", "top_p", "temperature"}:
        # Temperature 0 means greedy decoding.
        if greedy and (name != "temperature" or settings.temperature):
            parser.error(f"argument --{name}: is for --do_sample")
    if "seed" in given and greedy and settings.task not in ("align", "draft") and not synthetic:
        parser.error("argument --seed: is for --do_sample, --task align or draft, and synthetic pairs")
    if {"draft_models", "assistant_model"} <= given:
        parser.error("argument --assistant_model: is not used with --draft_models; give one of them")
    if "prompt_lengths" in given and settings.own_lengths:
        parser.error("argument --prompt_lengths: is not used with --prompt or --dataset, which have their own lengths")
    if "prompts" in given and "dataset" in given:
        parser.error("argument --prompt: is not used with --dataset; give one of them")
    if "draft_vocabulary" in given and not settings.assisted_generation:
        parser.error("argument --draft_vocabulary: is for --assisted_generation")
    if settings.task not in ("sweep", "subtasks"):  # which measure several strategies
        for strategy, own in STRATEGY_SETTINGS.items():
            if strategy != settings.generation_strategy and (unused := sorted(given & set(own))):
                parser.error(f"argument --{unused[0]}: is for --generation_strategy {strategy}")


def unused(settings: Settings, arguments: Sequence[str]) -> list[str]:
    """The flags of a command line that have no effect without `--assisted_generation`."""
    if settings.assisted_generation:
        return []
    of_drafts = {"assistant_model", "approx_model_name", "draft_device", "draft_dtype", "draft_precision", *STRATEGIC}
    of_drafts |= {"draft_gguf_file", "gamma", "n_lookahead", "fallback_thres", "rollback_thres"}
    flags = (text.partition("=")[0] for text in arguments)
    return [flag for flag in flags if flag.removeprefix("--") in of_drafts and flag.startswith("--")]


def check_text(arguments: Sequence[str]) -> None:
    """Raise `BenchError` for an argument that cannot be stored in a result."""
    for text in arguments:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BenchError(f"argument {text!r}: is not UTF-8, so it cannot be stored in a result") from error
