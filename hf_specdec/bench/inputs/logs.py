"""Logs: prompts with a target's answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.bench.inputs.prompts import Prompt, fitted, question_prompt
from hf_specdec.bench.inputs.questions import Question, cell, dialogues, is_embedded, is_spec_bench, malformed, rows
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.settings import BenchError, Settings


@dataclass(frozen=True)
class Logged:
    """A prompt, from which `cut` tokens were removed, and the tokens of its answer, or None if it has no answer."""

    prompt: Prompt
    cut: int
    answer: tuple[int, ...] | None = None


def logged(settings: Settings, pair: LoadedPair) -> list[Logged]:
    """Read the prompts of a data set (the first turns of dialogues), with the answers of `answer_column` if given.

    Each cell is a text or a list of token ids. A text is put into the chat template, as in every task; ids are used
    unchanged. Answers are cut at `max_new_tokens`; a shorter text gets an EOS.

    Raises:
        BenchError: as in `dialogues`, or a cell that is neither.
    """
    new_tokens = settings.max_new_tokens
    if is_embedded(settings.dataset) or is_spec_bench(settings.dataset):
        asked = [dialogue[0] for dialogue in dialogues(settings)]
        return [Logged(*question_prompt(pair, one, (), new_tokens)) for one in asked]
    found = list(_rows(settings, pair))
    if not found:
        raise BenchError(f"--dataset: {settings.dataset!r} has no answers; give another one")
    return found


def _rows(settings: Settings, pair: LoadedPair) -> Iterator[Logged]:
    label = Path(settings.dataset).name
    for index, (number, row) in enumerate(rows(settings)):
        if index == settings.limit:
            return
        asked = cell(row, settings, "prompt_column", number)
        if isinstance(asked, str) and asked.strip():
            text = settings.prompt_template.replace("{prompt}", asked)
            prompt, cut = question_prompt(pair, Question(index, label, (text,)), (), settings.max_new_tokens)
        elif _is_ids(asked):
            ids, cut = fitted(pair, list(asked), settings.max_new_tokens)
            prompt = Prompt(index, label, tuple(ids))
        else:
            raise malformed(label, number, f"its {settings.prompt_column!r} is neither a text nor a list of token ids")
        if settings.answer_column is None:
            yield Logged(prompt, cut)
            continue
        given = cell(row, settings, "answer_column", number)
        if not (isinstance(given, str) and given) and not _is_ids(given):
            raise malformed(label, number, f"its {settings.answer_column!r} is neither a text nor a list of token ids")
        yield Logged(prompt, cut, _answer(pair, given, settings.max_new_tokens))


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


def _answer(pair: LoadedPair, given: str | list[int], most: int) -> tuple[int, ...]:
    if not isinstance(given, str):
        return tuple(pair.up_to_eos(given)[:most])
    ids = pair.up_to_eos(list(pair.tokenizer(given, add_special_tokens=False).input_ids))
    if not set(ids) & set(pair.eos_tokens):
        ids += pair.eos_tokens[:1]
    return tuple(ids[:most])
