"""The prompt format, and prompts of an exact length.

A dialogue is written as `<bos><|user|>question<|assistant|>answer<|end|>`. Further turns, and further dialogues as
solved examples, follow without a new `<bos>`. `<|end|>` is the end-of-sequence token. The texts made here have no
`<bos>`; the tokenizer adds it. A T5 encoder reads the same text up to the last question, without the last
`<|assistant|>`; its decoder writes `answer<|end|>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from hf_specdec.embedded.corpus.examples import SUBTASKS, Example, generate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, BOS, END, USER, ASSISTANT = "<pad>", "<bos>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS: tuple[str, ...] = (PAD, BOS, END, USER, ASSISTANT)  # in the order of their ids
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def solved_text(example: Example) -> str:
    """The whole dialogue with its reference answers."""
    return "".join(
        f"{USER}{turn}{ASSISTANT}{reference}{END}"
        for turn, reference in zip(example.turns, example.references, strict=True)
    )


def encoder_text(example: Example, turn: int = 0, previous_answers: Sequence[str] = ()) -> str:
    """The text that a T5 encoder reads before it answers `turn`; earlier turns have the given answers.

    Raises:
        ValueError: the example has no such turn, or answers to earlier turns are missing.
    """
    if not 0 <= turn < len(example.turns):
        raise ValueError(f"turn={turn} is out of range: the example has {len(example.turns)} turns, counted from 0")
    if len(previous_answers) < turn:
        raise ValueError(f"previous_answers has {len(previous_answers)} answers, but turn={turn} needs {turn}")
    past = "".join(f"{USER}{example.turns[i]}{ASSISTANT}{previous_answers[i]}{END}" for i in range(turn))
    return f"{past}{USER}{example.turns[turn]}"


def render_prompt(example: Example, turn: int = 0, previous_answers: Sequence[str] = ()) -> str:
    """The prompt of a decoder-only model for `turn`, as text without `<bos>`; the answer follows it.

    Raises:
        ValueError: as `encoder_text`.
    """
    return encoder_text(example, turn, previous_answers) + ASSISTANT


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    length: int | None = None,
    *,
    encoder: bool = False,
    turn: int = 0,
    previous_answers: Sequence[str] = (),
) -> list[int]:
    """Token ids of a prompt, beginning with `<bos>`; exactly `length` tokens if it is given.

    A prompt that is too short gets solved examples from the training split in front, the same ones each time. One that
    is too long loses tokens after `<bos>`.

    Raises:
        ValueError: the length is below 2, or as `encoder_text`.
    """
    text = (encoder_text if encoder else render_prompt)(example, turn, previous_answers)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if length is None:
        return [tokenizer.bos_token_id, *ids]
    if length < 2:
        raise ValueError(f"length={length} is out of range: give at least 2 tokens")
    rng = Random(f"few-shot/{example.turns[0]}")
    while len(ids) < length - 1:
        solved = solved_text(generate(rng.choice(SUBTASKS), "train", rng))
        ids = tokenizer(solved, add_special_tokens=False)["input_ids"] + ids
    return [tokenizer.bos_token_id, *ids[len(ids) - (length - 1) :]]
