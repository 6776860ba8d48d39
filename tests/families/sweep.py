"""Compares greedy speculation with plain `generate` on every class of transformers that can be made small.

Prints a line per class: equal, refused (why), not tried (why) or WRONG. Run by `make families`.
"""

import argparse
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from helpers.class_inputs import Inputs, accepted_inputs
from helpers.generating_classes import generating_classes, small_pair
from torch import Tensor
from transformers import PreTrainedModel

import hf_specdec

SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
DRAFTERS = ("none", "suffix", "model")
SECONDS = 120  # for a class


def verdict(kind: type[PreTrainedModel]) -> str:
    """A line about a class, without its name."""
    try:
        models, inputs = _accepted(kind)
    except Exception as error:
        return f"not tried: {_said(error)}"
    wrong, refused, texts = [], [], []
    for form, given in inputs:
        plain = _plain(models[0], given)
        texts.append(plain)
        for drafter in DRAFTERS:
            outcome, why = _compared(*models, given, plain, drafter)
            if outcome == "refused":
                refused.append(why)
            elif outcome == "wrong":
                wrong.append(f"{form}, {len(plain)} rows, drafter={drafter!r}: {why}")
    if wrong:
        return f"WRONG: {'; '.join(wrong)}"
    if refused:
        return f"refused: {refused[0]}"
    varied = max(len(row.unique()) for text in texts for row in text)
    return (
        f"equal: {', '.join(dict.fromkeys(form for form, _ in inputs))}, {models[0].dtype}, {varied} different tokens"
    )


def _accepted(kind: type[PreTrainedModel]) -> tuple[tuple[PreTrainedModel, PreTrainedModel], list[tuple[str, Inputs]]]:
    """A target and its draft, and inputs of one row and of three, by name; in float32 where float64 fails.

    Raises:
        Exception: plain `generate` fails, too.
    """
    errors = []
    for dtype in (torch.float64, torch.float32):
        try:
            models = small_pair(kind, dtype)
            return models, [named for rows in (1, 3) for named in accepted_inputs(models[0], rows, _plain).items()]
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _plain(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    cast = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    out = model.generate(**cast, **SETTINGS, return_dict_in_generate=True, output_logits=True)
    if any(logits.isnan().any() for logits in out.logits):
        raise ArithmeticError("plain generate computes NaN")
    sequences: Tensor = out.sequences
    return sequences


def _compared(
    target: PreTrainedModel, draft: PreTrainedModel, inputs: Inputs, plain: Tensor, drafter: str
) -> tuple[str, str]:
    """ "equal", "refused" or "wrong", and why."""
    cast = {key: value.to(target.dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    more = {"assistant_model": draft} if drafter == "model" else {}
    try:
        with hf_specdec.enable(target, generation_strategy="speculative", drafter=drafter, **more):
            out = target.generate(**cast, **SETTINGS, num_assistant_tokens=4, return_dict_in_generate=True).sequences
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, ValueError) and "hf_specdec" in frames[-1].filename:
            return "refused", str(error)
        return "wrong", f"{_said(error)} ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})"
    if hf_specdec.last_speculation(target) is None:
        return "wrong", "the call did not speculate"
    if torch.equal(out, plain):
        return "equal", ""
    width = min(out.shape[1], plain.shape[1])
    differs = (out[:, :width] != plain[:, :width]).any(dim=0).nonzero()
    return "wrong", f"other tokens from place {int(differs[0]) if len(differs) else width}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def main() -> int:
    """Print the lines; 1 if one of them says WRONG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes; all if none is given")
    names = parser.parse_args().names
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for kind in generating_classes():
        if names and kind.__name__ not in names:
            continue
        try:
            with _at_most(SECONDS):
                line = verdict(kind)
        except TimeoutError as error:
            line = f"not tried: {error}"
        counts[line.split(":")[0]] += 1
        print(f"{kind.__name__}: {line}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
