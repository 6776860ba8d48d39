#!/usr/bin/env python
"""Benchmarks and runs assisted generation; `--task benchmark --assisted_generation` is the main job."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

# From a checkout the package beside this folder is meant, installed or not; a copy on PATH has no such
# neighbour.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "hf_specdec" / "__init__.py").is_file():
    sys.path.insert(0, str(_CHECKOUT))

_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def build_parser() -> argparse.ArgumentParser:
    """All arguments, with their aliases, defaults and ranges."""
    parser = _OneLineParser(
        prog="assisted_generation.py",
        description="Benchmarks speculative and BiLD decoding under generate(), or decodes prompts.",
        allow_abbrev=False,
    )
    parser.add_argument("--task", choices=("benchmark", "decode"), default="benchmark", help="what to do (%(default)s)")
    _add_model_arguments(parser.add_argument_group("models"))
    _add_speculation_arguments(parser.add_argument_group("speculation"))
    _add_sampling_arguments(parser.add_argument_group("sampling"))
    add = parser.add_argument_group("work and output").add_argument
    add(
        "--max_new_tokens",
        "--max_tokens",
        type=_at_least(1),
        default=30,
        metavar="N",
        help="new tokens at most (%(default)s)",
    )
    add(
        "--prompt_lengths",
        type=_at_least(1),
        nargs="+",
        default=[256, 512],
        metavar="N",
        help="benchmark: in tokens (256 512)",
    )
    add(
        "--prompt",
        dest="prompts",
        action="append",
        default=[],
        metavar="TEXT",
        help="decode: a prompt; repeatable",
    )
    add("--repeats", type=_at_least(1), metavar="N", help="times that all is measured; benchmark 3, decode 1")
    add(
        "--output_dir",
        type=Path,
        default=Path("results", "latest"),
        metavar="DIR",
        help="for JSON and markdown (%(default)s)",
    )
    return parser


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    model_help = "target: hub name, folder, short name of a known pair, or embedded model (%(default)s)"
    add("--model_name", "--target_model_name", default="target", metavar="NAME", help=model_help)
    add(
        "--assistant_model",
        "--approx_model_name",
        metavar="NAME",
        help="draft; by default the one known for the target",
    )
    add(
        "--device",
        metavar="DEVICE",
        help="of the target, such as cpu or cuda:0; by default a GPU if there is one",
    )
    add("--draft_device", metavar="DEVICE", help="of the draft; by default the target's")
    add("--dtype", choices=_DTYPES, default="auto", help="of the target; auto: as stored (%(default)s)")
    add("--draft_dtype", choices=_DTYPES, default="auto", help="of the draft; auto: as --dtype (%(default)s)")


def _add_speculation_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--assisted_generation", action="store_true", help="decode with a draft, and compare")
    add(
        "--generation_strategy",
        choices=("speculative", "bild"),
        default="speculative",
        help="how to use the draft (%(default)s)",
    )
    lookahead = "draft tokens per round; by default 4, or 7 for T5"
    add("--num_assistant_tokens", "--gamma", "--n_lookahead", type=_at_least(1), metavar="N", help=lookahead)
    fallback = "BiLD: the target takes over below this draft probability (%(default)s)"
    add(
        "--fallback_threshold",
        "--fallback_thres",
        type=_between(0, 1),
        default=0.6,
        metavar="P",
        help=fallback,
    )
    rollback = "BiLD: drafted tokens further than this from the target's choice, in nats, are cut (%(default)s)"
    add(
        "--rollback_threshold",
        "--rollback_thres",
        type=_between(0, None),
        default=3.0,
        metavar="D",
        help=rollback,
    )


def _add_sampling_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--do_sample", action="store_true", help="draw tokens instead of taking the likeliest")
    add("--temperature", type=_between(0, None), default=1.0, metavar="T", help="0 is greedy decoding (%(default)s)")
    add(
        "--top_k",
        type=_at_least(0),
        default=0,
        metavar="K",
        help="draw from the K likeliest tokens; 0: from all",
    )
    add(
        "--top_p",
        type=_between(0, 1),
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens that hold P",
    )
    add("--seed", type=_at_least(0), default=0, metavar="N", help="of the draws (%(default)s)")


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
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


def main(arguments: list[str] | None = None) -> int:
    """Parses and runs; returns the exit status: 0, 1 for what the user can put right, 130 for Ctrl-C."""
    parser = build_parser()
    options = vars(parser.parse_args(arguments))
    if options["repeats"] is None:
        options["repeats"] = 3 if options["task"] == "benchmark" else 1
    if options["assistant_model"] and not options["assisted_generation"]:
        print(f"{parser.prog}: --assistant_model is not used without --assisted_generation", file=sys.stderr)
    if options["prompts"] and options["task"] != "decode":
        print(f"{parser.prog}: --prompt is only used by --task decode", file=sys.stderr)
    options["prompts"], options["prompt_lengths"] = (
        tuple(options["prompts"]),
        tuple(options["prompt_lengths"]),
    )

    # Only now, since these take seconds, which nobody should wait for a typing error.
    import transformers

    from hf_specdec.bench.benchmark import run_benchmark
    from hf_specdec.bench.decode import run_decode
    from hf_specdec.bench.settings import BenchError, Settings

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Failed connections are reported once, by us.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        settings = Settings(**options)
        {"benchmark": run_benchmark, "decode": run_decode}[settings.task](settings)
    except BenchError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog}: stopped before the end; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
