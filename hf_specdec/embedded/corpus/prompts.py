"""The prompt format, and prompts of an exact length.

A dialogue is written as `<bos><|user|>question<|assistant|>answer<|end|>`, further turns (and further
dialogues, which then serve as solved examples) following without a new `<bos>`. `<|end|>` is the
end-of-sequence token. The tokenizer adds `<bos>`; the texts made here never hold it. A T5 encoder reads
the same text up to the last question, without the last `<|assistant|>`; its decoder writes `answer<|end|>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from hf_specdec.embedded.corpus.examples import SUBTASKS, Example, generate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, BOS, END, USER, ASSISTANT = "<pad>", "<bos>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS: tuple[str, ...] = (PAD, BOS, END, USER, ASSISTANT)  # their ids are their places here
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
    """What a T5 encoder reads before answering `turn`; earlier turns carry the given answers.

    Raises:
        ValueError: for a turn that the example lacks, or if answers to earlier turns are missing.
    """
    if not 0 <= turn < len(example.turns):
        raise ValueError(f"turn={turn} is not in an example of {len(example.turns)} turns; they count from 0")
    if len(previous_answers) < turn:
        raise ValueError(f"previous_answers holds {len(previous_answers)} answers; turn={turn} needs {turn}")
    past = "".join(f"{USER}{example.turns[i]}{ASSISTANT}{previous_answers[i]}{END}" for i in range(turn))
    return f"{past}{USER}{example.turns[turn]}"


def render_prompt(example: Example, turn: int = 0, previous_answers: Sequence[str] = ()) -> str:
    """The decoder's prompt for `turn` as text without `<bos>`, ready for the answer.

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
    """Token ids of a prompt, `<bos>` first; of exactly `length` tokens if it is given.

    A short prompt gets solved examples of the training split in front, of all subtasks, the same ones each
    time; what is too long is cut on the left, behind `<bos>`.

    Raises:
        ValueError: for a length below 2, and as `encoder_text`.
    """
    text = (encoder_text if encoder else render_prompt)(example, turn, previous_answers)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if length is None:
        return [tokenizer.bos_token_id, *ids]
    if length < 2:
        raise ValueError(f"length={length} leaves no room for a prompt; give at least 2")
    rng = Random(f"few-shot/{example.turns[0]}")
    while len(ids) < length - 1:
        solved = solved_text(generate(rng.choice(SUBTASKS), "train", rng))
        ids = tokenizer(solved, add_special_tokens=False)["input_ids"] + ids
    return [tokenizer.bos_token_id, *ids[len(ids) - (length - 1) :]]
