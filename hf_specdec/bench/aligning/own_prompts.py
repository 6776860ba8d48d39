"""Prompts that a target writes itself, for users without prompts.

The target continues what its chat template puts before a user's message: Magpie (Xu et al. 2024, arXiv 2406.08464).
A model without a template continues its `<bos>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from hf_specdec.bench.aligning.drawing import SAMPLED, drawing
from hf_specdec.bench.inputs.prompts import Prompt, frame
from hf_specdec.bench.inputs.questions import OWN, Question
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.settings import BenchError, Settings

_LONGEST = 64  # tokens of a prompt
_TEXT = 24  # tokens of a prompt from a model without a template: the start of a text
_FEWEST = 16  # batches without any prompt, after which the target is refused


def writes(pair: LoadedPair) -> bool:
    """Whether a target has a text from which it could write prompts: a chat template or a `<bos>`."""
    return bool(frame(pair, task=False)[0])


def own_groups(file: Path, settings: Settings, pair: LoadedPair) -> Iterator[list[list[Question]]]:
    """Batches of `settings.batch_size` different prompts, `[turn][row]`, without end.

    Prompts in `file` come first, so that a resumed run has the same prompts. Prompts are drawn as `SAMPLED` says.

    Raises:
        BenchError: the target writes no prompts.
    """
    known: dict[str, None] = {}
    given = 0
    for texts in _written(file, settings, pair):
        known |= dict.fromkeys(texts)
        while len(known) - given >= settings.batch_size:
            rows = list(known)[given : given + settings.batch_size]
            yield [[Question(given + row, OWN, (text,)) for row, text in enumerate(rows)]]
            given += settings.batch_size


def own_questions(file: Path, indexes: Iterable[int]) -> list[list[Question]]:
    """Dialogues of one turn with the prompts at these indexes."""
    texts = list(dict.fromkeys(text for line in file.read_text().splitlines() for text in json.loads(line)))
    return [[Question(index, OWN, (texts[index],))] for index in indexes]


def _written(file: Path, settings: Settings, pair: LoadedPair) -> Iterator[Sequence[str]]:
    """The prompts of each batch; those in `file` first."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = [line for line in lines if line.endswith("\n")]  # an interruption may leave half a line
    kept = [json.loads(line) for line in whole]
    yield from kept
    start, _ = frame(pair, task=False)
    if not start:
        raise BenchError(
            f"--dataset: {pair.target_name!r} has neither a chat template nor a <bos> from which it could write "
            "prompts; give some by --dataset"
        )
    templated = bool(getattr(pair.tokenizer, "chat_template", None))
    sampled = replace(settings, **SAMPLED, max_new_tokens=_LONGEST if templated else _TEXT)
    contender, drawn = drawing(plain(pair), sampled)
    found = any(kept)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(whole))
    for number in count(len(kept)):
        rows = range(number * settings.batch_size, (number + 1) * settings.batch_size)
        call = timed_call(contender, [Prompt(row, OWN, tuple(start)) for row in rows], drawn)
        # A prompt that did not end within the limit is incomplete.
        ended = [row for row in call.tokens or () if not templated or row[-1] in pair.eos_tokens]
        texts = [pair.tokenizer.decode(row, skip_special_tokens=True).strip() for row in ended]
        texts = [text for text in texts if text]
        with file.open("a") as stream:
            stream.write(json.dumps(texts) + "\n")
        found = found or bool(texts)
        if not found and number >= _FEWEST:
            raise BenchError(f"--dataset: {pair.target_name!r} writes no prompts of its own; give some by --dataset")
        yield texts
