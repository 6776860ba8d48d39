#!/usr/bin/env python
"""Measures assisted generation, or decodes prompts with it; start with `--task benchmark --assisted_generation`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

# In a checkout, use the package beside this folder, installed or not. A copy of the script on PATH has none beside it.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "hf_specdec" / "__init__.py").is_file():
    sys.path.insert(0, str(_CHECKOUT))

# What each task does unless told otherwise: (new tokens at most, repeats).
_TASKS = {
    "benchmark": (30, 7),
    "decode": (30, 1),
    "subtasks": (128, 7),
    "sweep": (128, 7),
    "ablation": (64, 7),
    "engines": (128, 7),
    "tune": (128, 1),
    "align": (128, 3),
    "report": (1, 1),
}
_PROMPT_LENGTHS = {"engines": [256]}
_ENGINES = ("eager", "static", "compiled")
_LLAMA_CPP = ("llama.cpp-f32", "llama.cpp-bf16", "llama.cpp-q8_0")
# What `hf_specdec[bench]` installs.
_PACKAGES = ("datasets", "evaluate", "matplotlib", "psutil", "rouge_score", "sacrebleu", "scipy", "tabulate")
# Arguments that `sweep` takes several values of, and crosses; `engines` those of the first.
_GRID = (
    "num_assistant_tokens", "fallback_threshold", "rollback_threshold", "lenience", "posterior_threshold",
    "assistant_ensemble_weight", "drafter", "verification", "entropy_threshold", "compile", "cache_implementation",
)  # fmt: skip


def _all_but(*tasks: str) -> tuple[str, ...]:
    """The tasks that measure, without some."""
    return tuple(task for task in _TASKS if task not in (*tasks, "report"))


_DATA = ("subtasks", "sweep", "ablation", "tune", "align")
_STRATEGIC = ("benchmark", "decode", "sweep", "ablation")
# The strategies that settings belong to.
_STRATEGIES = {
    "fallback_threshold": "bild", "rollback_threshold": "bild", "lenience": "lenient",
    "posterior_threshold": "typical", "assistant_ensemble_weight": "ensemble",
}  # fmt: skip
# The tasks on which an argument has an effect; all that measure, if it isn't listed.
_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "task": tuple(_TASKS), "output_dir": tuple(_TASKS),
    "prompts": ("decode",), "minutes": ("tune",), "max_quality_loss": ("tune",),
    "draft_models": ("sweep", "tune"), "engines": ("engines", "tune"),
    "draft_vocabulary": ("benchmark",), "better_transformer": _all_but("ablation"),
    "prompt_lengths": ("benchmark", "engines"), "batch_sizes": _all_but(),
    "repeats": _all_but("tune"), "limit": ("benchmark", "engines", *_DATA),
    **dict.fromkeys(("dataset", "dataset_path", "split", "prompt_column", "prompt_template"), _DATA),
    "reference_column": ("subtasks", "sweep", "tune"),
    **dict.fromkeys(_GRID, _all_but("engines", "tune")), "num_assistant_tokens": _all_but("tune"),
    **dict.fromkeys(("generation_strategy", *_STRATEGIES), _STRATEGIC),
    **dict.fromkeys(("fallback_threshold", "rollback_threshold"), (*_STRATEGIC, "subtasks")),
    **dict.fromkeys(("loss", "steps", "learning_rate", "top_k_targets", "lora_rank", "on_policy"), ("align",)),
}  # fmt: skip
# What has no effect without a draft.
_OF_DRAFTS = ("assistant_model", "draft_device", "draft_dtype", "draft_precision", "generation_strategy", *_GRID)
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


class _OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def build_parser() -> argparse.ArgumentParser:
    """All arguments, with their aliases, defaults and ranges."""
    parser = _OneLineParser(
        prog="assisted_generation.py",
        description="Measures speculative decoding and BiLD in generate(). The task report takes --output_dir alone.",
        allow_abbrev=False,
    )
    parser.add_argument("--task", choices=tuple(_TASKS), default="benchmark", help="what to do (%(default)s)")
    _add_model_arguments(parser.add_argument_group("models"))
    _add_precision_arguments(parser.add_argument_group("precision and place"))
    _add_speculation_arguments(parser.add_argument_group("speculation"))
    _add_sampling_arguments(parser.add_argument_group("sampling, with --do_sample"))
    _add_data_arguments(parser.add_argument_group("data sets"))
    _add_align_arguments(parser.add_argument_group("training"))
    _add_work_arguments(parser.add_argument_group("work and output"))
    for action in parser._actions:
        tasks = _ONLY_FOR.get(action.dest, _all_but())
        others = _all_but(*tasks)
        if len(tasks) <= len(others):
            action.help = f"{', '.join(tasks)}: {action.help}"
        elif others:
            action.help = f"{action.help}; not for {', '.join(others)}"
    return parser


def _defaults(place: int, name: str) -> str:
    """The tasks' values of an argument, for its help."""
    return "default: " + ", ".join(f"{task} {_TASKS[task][place]}" for task in _ONLY_FOR.get(name, _all_but()))


def _add_work_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    tokens = f"most new tokens per answer; {_defaults(0, 'max_new_tokens')}"
    add("--max_new_tokens", "--max_tokens", type=_at_least(1), metavar="N", help=tokens)
    lengths = "prompt lengths in tokens; default: benchmark 256 512, engines 256"
    add("--prompt_lengths", type=_at_least(1), nargs="+", metavar="N", help=lengths)
    sizes = "texts decoded at once (1); align: in a training step too (8); engines (1 4 8) and tune take several"
    add("--batch_size", "--batch_sizes", dest="batch_sizes", nargs="+", type=_at_least(1), metavar="N", help=sizes)
    engines = f"some of {', '.join(_ENGINES + _LLAMA_CPP)}; default: eager compiled, tune eager static compiled"
    add("--engines", nargs="+", choices=_ENGINES + _LLAMA_CPP, metavar="NAME", help=engines)
    add("--minutes", type=_above(0), default=10.0, metavar="M", help="how long it may take (%(default)g)")
    loss = "also try BiLD, with at most this loss of quality; default: lossless methods only"
    add("--max_quality_loss", type=_between(0, 100), metavar="POINTS", help=loss)
    asked = "the prompt; give it several times for several prompts"
    add("--prompt", dest="prompts", action="append", default=[], metavar="TEXT", help=asked)
    times = f"how often each measurement is repeated; {_defaults(1, 'repeats')}"
    add("--repeats", type=_at_least(1), metavar="N", help=times)
    folder = "where JSON, markdown and pictures go (%(default)s); report: the folder to render"
    add("--output_dir", type=Path, default=Path("runs"), metavar="DIR", help=folder)


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    model_help = (
        "target: hub name, folder, short name of a known pair, embedded model (%(default)s), or a pair with random "
        "weights, synthetic:SHAPE[:alpha=A][:draft=WIDTHxLAYERS | :c=C], with SHAPE smollm-135m, qwen2-0.5b, "
        "tinyllama-1.1b, llama-2-7b, qwen2-7b, opt-6.7b or falcon-h1-0.5b, A the acceptance and C the "
        "draft's cost (0.8, 0.05)"
    )
    add("--model_name", "--target_model_name", default="target", metavar="NAME", help=model_help)
    draft = "draft model; default: the one known for the target"
    add("--assistant_model", "--approx_model_name", metavar="NAME", help=draft)
    pickled = "also read weights from pytorch_model.bin, where a model has no safetensors"
    add("--allow_pickle", action="store_true", help=pickled)
    several = "drafts to compare; default: --assistant_model, or all that are known"
    add("--draft_models", nargs="+", default=[], metavar="NAME", help=several)
    better = "use SDPA attention (hf_specdec.to_better_transformer); ablation always measures both"
    add("--better_transformer", action="store_true", help=better)


def _add_precision_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", metavar="DEVICE", help="device of the target, as cpu or cuda:0; default: a GPU if there is one")
    add("--draft_device", metavar="DEVICE", help="device of the draft; default: the target's")
    dtype = "dtype of the target; auto: that of its configuration (%(default)s)"
    add("--dtype", choices=_DTYPES, default="auto", help=dtype)
    add("--draft_dtype", choices=_DTYPES, default="auto", help="dtype of the draft; auto: as --dtype (%(default)s)")
    add("--precision", choices=("int8", "int4"), help="quantize the target's weights with optimum-quanto")
    add("--draft_precision", choices=("int8", "int4"), help="quantize the draft's weights")
    trimmed = "with --assisted_generation, compare with a draft that proposes only the N most frequent tokens"
    add("--draft_vocabulary", type=_at_least(1), metavar="N", help=trimmed)
    add("--device_map", metavar="MAP", help="auto: spread the target over all devices with accelerate")
    offloaded = "with --device_map: folder for weights that fit on no device"
    add("--offload_folder", type=Path, metavar="DIR", help=offloaded)


def _add_data_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    names = (
        "embedded, embedded:SUBTASK, spec_bench, a local file, or a name that `datasets` knows, as NAME[:CONFIG] "
        "(%(default)s)"
    )
    add("--dataset", default="embedded", metavar="NAME", help=names)
    add("--dataset_path", type=Path, metavar="FILE", help="spec_bench: its question.jsonl")
    split = "split of the data; embedded: train or heldout (heldout); data sets from the hub: any of theirs (test)"
    add("--split", metavar="NAME", help=split)
    add("--prompt_column", metavar="COLUMN", help="column of the prompts; a dot enters a nested one: translation.de")
    add("--reference_column", metavar="COLUMN", help="column of the reference answers, for quality")
    template = "text around each prompt; {prompt} is its place (%(default)s)"
    add("--prompt_template", type=_template, default="{prompt}", metavar="TEXT", help=template)
    examples = (
        "examples per subtask (all; embedded: subtasks 50, sweep 5, with lossy strategies 50, ablation 3, align 125); "
        "benchmark and engines: prompts of each length (5 and 8), at least a batch"
    )
    add("--limit", type=_at_least(1), metavar="N", help=examples)


def _add_speculation_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    assisted = "decode with a draft; benchmark and decode compare it with plain decoding, the other tasks always do"
    add("--assisted_generation", action="store_true", help=assisted)
    strategies = ("speculative", *dict.fromkeys(_STRATEGIES.values()))
    add("--generation_strategy", choices=strategies, default="speculative", help="how to use the draft (%(default)s)")
    lookahead = "tokens drafted per round, or auto (4, T5 7); sweep and engines (adds auto) take several"
    add("--num_assistant_tokens", "--gamma", "--n_lookahead", nargs="+", type=_lookahead, metavar="N", help=lookahead)
    fallback = "BiLD: a draft ends where its best token has a probability below P (0.6); sweep takes several"
    add("--fallback_threshold", "--fallback_thres", nargs="+", type=_between(0, 1), metavar="P", help=fallback)
    rollback = "BiLD: a drafted token is rejected if the target's -ln p exceeds D nats (3); sweep takes several"
    add("--rollback_threshold", "--rollback_thres", nargs="+", type=_between(0, None), metavar="D", help=rollback)
    lenience = "lenient: keep if p > L max p; sampling: with chance min(1, p / (L q)) (0.5); sweep takes several"
    add("--lenience", nargs="+", type=_between(0, 1), metavar="L", help=lenience)
    typical = "typical: keep if p > min(E, sqrt(E) exp(-H)) (0.09); sweep takes several"
    add("--posterior_threshold", nargs="+", type=_between(0, None), metavar="E", help=typical)
    ensemble = "ensemble: drafts are judged by W target + (1 - W) draft (0.5); sweep takes several"
    add("--assistant_ensemble_weight", nargs="+", type=_between(0, 1), metavar="W", help=ensemble)
    choices = {
        "drafter": (("model", "lookup", "hybrid", "none"), "who drafts (model); sweep takes several"),
        "verification": (("token", "block"), "how sampling judges drafted tokens (token); sweep takes several"),
        "cache_implementation": (("dynamic", "static"), "cache of our methods (dynamic); sweep takes several"),
    }
    for name, (values, text) in choices.items():
        add(f"--{name}", nargs="+", choices=values, help=text)
    entropy = "a draft ends after a token with 1 - sqrt(0.2 entropy) below P; sweep takes several"
    add("--entropy_threshold", nargs="+", type=_between(0, 1), metavar="P", help=entropy)
    compiled = "compile the rounds of our methods; sweep: 'no yes' tries both"
    add("--compile", nargs="*", choices=("no", "yes"), help=compiled)


def _add_align_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    losses = ("cross_entropy", "forward_kl", "reverse_kl", "total_variation")
    add("--loss", choices=losses, default="forward_kl", help="training loss (%(default)s)")
    add("--steps", type=_at_least(1), metavar="N", help="steps of --batch_size texts (5 epochs, at least 300)")
    add("--learning_rate", type=_above(0), metavar="R", help="peak (1e-4 to 4e-3, by the draft's size)")
    stored = "store the target's K most likely tokens with its answers, so that training doesn't run the target"
    add("--top_k_targets", type=_at_least(1), metavar="K", help=stored)
    add("--lora_rank", type=_at_least(1), metavar="R", help="train LoRA matrices of this rank, then merge them")
    written = "share of the steps in which the draft writes the answers and the target judges them (%(default)s)"
    add("--on_policy", type=_between(0, 1), default=0.0, metavar="P", help=written)


def _add_sampling_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--do_sample", action="store_true", help="sample tokens instead of taking the most likely one")
    add("--temperature", type=_between(0, None), default=1.0, metavar="T", help="0 is greedy decoding (%(default)s)")
    top_k = "sample from the K most likely tokens; 0: from all (%(default)s, as in transformers)"
    add("--top_k", type=_at_least(0), default=50, metavar="K", help=top_k)
    top_p = "sample from the most likely tokens whose probabilities add up to P (%(default)s)"
    add("--top_p", type=_between(0, 1), default=1.0, metavar="P", help=top_p)
    seed = "seed of the samples, of synthetic weights and of align's training (%(default)s)"
    add("--seed", type=_at_least(0), default=0, metavar="N", help=seed)


def _lookahead(text: str) -> int | str:
    return text if text == "auto" else _at_least(1, " or auto")(text)


def _template(text: str) -> str:
    if "{prompt}" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} lacks {{prompt}}, the place where the prompt goes")
    return text


def _at_least(least: int, otherwise: str = "") -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}{otherwise}")
        return value

    return parse


def _above(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = _between(least, None)(text)
        if value == least:
            raise argparse.ArgumentTypeError(f"{text!r} is no number above {least}")
        return value

    return parse


def _between(least: float, most: float | None) -> Callable[[str], float]:
    wanted = f"no number of at least {least}" if most is None else f"no number from {least} to {most}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        # Written so that nan fails.
        if not (value >= least and (most is None or value <= most)):
            raise argparse.ArgumentTypeError(f"{text!r} is {wanted}")
        return value

    return parse


def _refuse_unused(parser: argparse.ArgumentParser, options: dict[str, Any], given: dict[str, str]) -> None:
    """Ends with an error at the first of the given arguments, names with flags, that has no effect."""
    task, greedy = options["task"], not options["do_sample"]
    for name, flag in given.items():
        if task not in (tasks := _ONLY_FOR.get(name, _all_but())):
            parser.error(f"argument {flag}: is for --task {', '.join(tasks)}")
        # A temperature of 0 asks for greedy decoding.
        if greedy and (name in ("top_k", "top_p") or (name == "temperature" and options[name])):
            parser.error(f"argument {flag}: is for --do_sample")
    if "seed" in given and greedy and task != "align" and not options["model_name"].startswith("synthetic:"):
        parser.error("argument --seed: is for --do_sample, --task align and synthetic pairs")
    if {"draft_models", "assistant_model"} <= given.keys():
        parser.error("argument --assistant_model: is not used with --draft_models; give one of them")
    if "draft_vocabulary" in given and not options["assisted_generation"]:
        parser.error("argument --draft_vocabulary: is for --task benchmark --assisted_generation")
    for name, strategy in _STRATEGIES.items():
        # Sweep and subtasks measure several strategies.
        if name in given and task not in ("sweep", "subtasks") and strategy != options["generation_strategy"]:
            parser.error(f"argument {given[name]}: is for --generation_strategy {strategy}")


def complete(parser: argparse.ArgumentParser, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Settings`: refuses unused ones, fills in the task's defaults, unpacks single values."""
    task = options["task"]
    actions = {action.dest: action for action in parser._actions if action.dest in options}
    given = {name: a.option_strings[0] for name, a in actions.items() if options[name] != a.default}
    _refuse_unused(parser, options, given)
    options["engines"] = options["engines"] or [*(_ENGINES if task == "tune" else ("eager", "compiled"))]
    if task == "tune" and (beyond := sorted(set(options["engines"]) & set(_LLAMA_CPP))):
        parser.error(f"argument --engines: {beyond[0]} is for --task engines")
    most_tokens, repeats = _TASKS[task]
    options["max_new_tokens"] = options["max_new_tokens"] or most_tokens
    options["repeats"] = options["repeats"] or repeats
    options["prompt_lengths"] = options["prompt_lengths"] or _PROMPT_LENGTHS.get(task, [256, 512])
    options["assisted_generation"] |= task not in ("benchmark", "decode", "report")
    options["batch_sizes"] = options["batch_sizes"] or {"engines": [1, 4, 8], "align": [8]}.get(task, [1])
    if (count := len(options["batch_sizes"])) > 1 and task not in ("engines", "tune"):
        parser.error(f"argument --batch_size: {count} values are for --task engines or tune; give one")
    options["grid"] = {}
    if options["compile"] is not None:
        options["compile"] = [value == "yes" for value in options["compile"]] or [True]
    for name in _GRID:
        values = options.pop(name) or []
        crossed = task == "sweep" or (task, name) == ("engines", "num_assistant_tokens")
        if len(values) > 1 and not crossed:
            takers = "--task sweep or engines" if name == "num_assistant_tokens" else "--task sweep"
            parser.error(f"argument --{name}: {len(values)} values are for {takers}; give one")
        if values and crossed:
            options["grid"][name] = tuple(values)
        elif values:
            options[name] = values[0]
    # No error, so that the same command without that flag measures the target alone.
    for name in given if task != "report" and not options["assisted_generation"] else ():
        if name in _OF_DRAFTS:
            print(f"{parser.prog}: {given[name]} is not used without --assisted_generation", file=sys.stderr)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; returns the exit status: 0, 1 for an error that the user can fix, 130 for Ctrl-C."""
    parser = build_parser()
    for text in sys.argv[1:] if arguments is None else arguments:
        try:
            text.encode()
        except UnicodeEncodeError:
            parser.error(f"argument {text!r}: is not UTF-8, so that no result could hold it")
    options = complete(parser, vars(parser.parse_args(arguments)))

    # Checked at the start, because some are imported only after everything has been measured.
    needed = () if options["task"] == "engines" else _PACKAGES  # without them `engines` writes JSON and no tables
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        advice = f"{', '.join(missing)} {verb} not installed; pip install 'hf_specdec[bench]'"
        print(f"{parser.prog}: error: {advice}", file=sys.stderr)
        return 1

    # Imported only now, because it takes seconds: a mistyped argument is reported at once.
    import transformers

    from hf_specdec.bench.settings import BenchError, Settings
    from hf_specdec.bench.tasks.task_table import run_task

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Failed connections are reported once, by us.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        run_task(Settings(**options))
    except BenchError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        journaled = options["task"] not in ("tune", "report")
        goes_on = "; what was measured is kept, and the same command continues it" if journaled else ""
        print(f"{parser.prog}: stopped before the end{goes_on}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
