"""Prompts: with an exact number of tokens (benchmark), or given by the user (decode)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from hf_specdec import embedded
from hf_specdec.bench.inputs import prose
from hf_specdec.bench.inputs.questions import Question, dialogues
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.models import traits

# Placeholder for the text while a chat template is rendered; removed before tokenization.
_MARKER = "\u2042filler\u2042"
# Asks for an answer that is long enough to be timed.
_CHAT_TASK = "\n\nTell in your own words, at length, what the text above says."
_ENCODER_TASK = "summarize: "
_PROMPT_SEED = 1
PRACTICE = 16  # number of prompts whose answers show which tokens a target writes


@dataclass(frozen=True)
class Prompt:
    """One prompt: `token_ids` is the model's main input (the encoder's, if it has one).

    `question` is the number of its example, which prompts of several lengths share. `recording` is the path of a sound
    file for models that transcribe speech; `token_ids` then only start the decoder.
    """

    index: int
    label: str
    token_ids: tuple[int, ...]
    question: int | None = None
    recording: str | None = None


def benchmark_prompts(
    pair: LoadedPair, lengths: Sequence[int], per_length: int, new_tokens: int, *, spare: int = 0
) -> list[Prompt]:
    """Make `per_length` prompts for each of `lengths`, with exactly that many tokens, from the same examples.

    Embedded pairs get held-out examples, alternating between subtasks; those with reference answers of at least
    `new_tokens` tokens come first, so that decoding is long enough to be timed. Other models get passages of a story,
    cut by their own tokenizer, inside their chat template if they have one; synthetic pairs get random tokens, since
    only the last one determines what follows. The context must have room for `spare` more tokens. Raises `BenchError`
    for a length that is not possible.
    """
    room = context_length(pair)
    for length in lengths:
        if room is not None and spare + length + (0 if pair.encoder_decoder else new_tokens) > room:
            raise BenchError(
                f"--prompt_lengths: {length} tokens and --max_new_tokens {new_tokens} don't fit into the "
                f"context of {room} tokens; give shorter prompts or fewer new tokens"
            )
    labelled: list[tuple[str, list[int]]] = []
    if pair.target_name in embedded.names():
        examples = _long_answers(pair, per_length, new_tokens)
        labelled = [(ex.subtask, _embedded_prompt(pair, ex, length)) for length in lengths for ex in examples]
    elif pair.synthetic is not None:
        rows = _random_tokens(pair, per_length, max(lengths))
        labelled = [("random tokens", row[-length:]) for length in lengths for row in rows]
    else:
        texts = [prose.passage(number, per_length) for number in range(per_length)]
        labelled = [("story", _filled_prompt(pair, length, text)) for length in lengths for text in texts]
    return [
        Prompt(index, label, tuple(token_ids), index % per_length) for index, (label, token_ids) in enumerate(labelled)
    ]


def asked_prompts(
    settings: Settings, pair: LoadedPair, count: int, *, spare: int = 0
) -> tuple[list[Prompt], list[str]]:
    """The prompts that `settings` name, or `count` of each of `prompt_lengths`; and notes on what was cut.

    From a data set come `count` first turns, alternating between subtasks.
    """
    if not settings.own_lengths:
        return benchmark_prompts(pair, settings.prompt_lengths, count, settings.max_new_tokens, spare=spare), []
    if settings.prompts:
        return decode_prompts(pair, settings.prompts, settings.max_new_tokens + spare)
    asked = in_turn_by_subtask([dialogue[0] for dialogue in dialogues(replace(settings, limit=count))])
    found = [question_prompt(pair, one, (), settings.max_new_tokens + spare) for one in asked[:count]]
    cut = sum(tokens > 0 for _, tokens in found)
    notes = [f"{cut} of {len(found)} prompts were longer than the context and cut on the left."] if cut else []
    return [prompt for prompt, _ in found], notes


def practice_prompts(pair: LoadedPair, length: int) -> list[Prompt]:
    """Prompts of about `length` tokens, from a part of the story that `asked_prompts` never uses."""
    texts = [prose.passage(number, PRACTICE, chapter=1) for number in range(PRACTICE)]
    smallest = sum(map(len, frame(pair))) + 16
    rows = [_filled_prompt(pair, max(length, smallest), text) for text in texts]
    return [Prompt(index, "story", tuple(row)) for index, row in enumerate(rows)]


def in_turn_by_subtask(questions: Sequence[Question]) -> list[Question]:
    """One question of each subtask, then the next of each, so that any prefix covers all subtasks evenly."""
    seen: Counter[str] = Counter()
    placed = []
    for one in questions:
        seen[one.subtask] += 1
        placed.append((seen[one.subtask], one.index, one))
    return [one for *_, one in sorted(placed, key=lambda item: item[:2])]


def decode_prompts(pair: LoadedPair, texts: Sequence[str], new_tokens: int) -> tuple[list[Prompt], list[str]]:
    """The user's prompts, or one held-out example of each subtask if none are given, and notes on what was cut.

    A prompt that does not fit into the context together with `new_tokens` is cut on the left.
    """
    asked = [Question(index, "--prompt", (text,)) for index, text in enumerate(texts)]
    if not asked:
        examples = [embedded.examples(subtask, split="heldout", n=1)[0] for subtask in embedded.SUBTASKS]
        asked = [Question(index, one.subtask, one.turns[:1]) for index, one in enumerate(examples)]
    found = [question_prompt(pair, one, (), new_tokens) for one in asked]
    notes = [
        f"prompt {prompt.index + 1} has {len(prompt.token_ids) + cut} tokens: cut on the left to the "
        f"{len(prompt.token_ids)} that fit"
        for prompt, cut in found
        if cut
    ]
    return [prompt for prompt, _ in found], notes


def question_prompt(
    pair: LoadedPair, question: Question, answers: Sequence[str], new_tokens: int
) -> tuple[Prompt, int]:
    """The prompt of a question after the given answers to its earlier turns, and the number of tokens cut.

    What does not fit into the context together with `new_tokens` is cut on the left; a leading `<bos>` is kept. For a
    target that transcribes speech, the question is the path of a recording.
    """
    if pair.extractor is not None:
        start = int(pair.target.generation_config.decoder_start_token_id)
        return Prompt(question.index, question.subtask, (start,), recording=question.turns[-1]), 0
    token_ids, cut = fitted(pair, _dialogue(pair, question.turns, answers), new_tokens)
    return Prompt(question.index, question.subtask, tuple(token_ids)), cut


def fitted(pair: LoadedPair, token_ids: list[int], new_tokens: int) -> tuple[list[int], int]:
    """The part of a prompt that fits into the context with `new_tokens`, and the number of tokens cut on the left."""
    room = _room(pair, new_tokens)
    cut = 0 if room is None else max(0, len(token_ids) - room)
    if cut:
        keep_first = token_ids[0] == pair.tokenizer.bos_token_id and room is not None and room > 1
        token_ids = [*token_ids[:1], *token_ids[cut + 1 :]] if keep_first else token_ids[cut:]
    return token_ids, cut


def _room(pair: LoadedPair, new_tokens: int) -> int | None:
    """The largest possible prompt in tokens; None without a limit. Raises `BenchError` if there is no room."""
    room = context_length(pair)
    if room is None or pair.encoder_decoder:
        return room
    if room <= new_tokens:
        raise BenchError(
            f"--max_new_tokens: {new_tokens} leaves no room for a prompt in a context of {room} tokens; ask for fewer"
        )
    return room - new_tokens


def context_length(pair: LoadedPair) -> int | None:
    """The number of positions that every model of the pair has; None if positions are relative."""
    lengths = [traits.context_length(model) for model in pair.models]
    known = [length for length in lengths if length is not None]
    return min(known) if known else None


def _long_answers(pair: LoadedPair, count: int, new_tokens: int) -> list[embedded.Example]:
    """Held-out examples, alternating between subtasks; those with long enough answers come first."""
    columns = [embedded.examples(subtask, split="heldout", n=8 * count) for subtask in embedded.SUBTASKS]
    in_turn = [example for row in zip_longest(*columns) for example in row if example is not None]

    def answer_tokens(example: embedded.Example) -> int:
        return len(pair.tokenizer(example.references[0], add_special_tokens=False).input_ids)

    # The sort is stable: subtasks still alternate.
    return sorted(in_turn, key=lambda example: answer_tokens(example) < new_tokens)[:count]


def _embedded_prompt(pair: LoadedPair, example: embedded.Example, length: int) -> list[int]:
    try:
        token_ids = embedded.prompt_ids(pair.tokenizer, example, length, encoder=pair.encoder_decoder)
    except ValueError as error:
        raise BenchError(f"--prompt_lengths: {length} is too short ({error}); give a longer length") from error
    return list(token_ids)


def _random_tokens(pair: LoadedPair, count: int, length: int) -> list[list[int]]:
    vocabulary = pair.target.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(_PROMPT_SEED)
    rows: list[list[int]] = torch.randint(vocabulary, (count, length), generator=generator).tolist()
    return rows


def _filled_prompt(pair: LoadedPair, length: int, text: str) -> list[int]:
    """Exactly `length` tokens: the text, repeated, inside the model's frame (special tokens, template, task)."""
    head, tail = frame(pair)
    room = length - len(head) - len(tail)
    if room < 1:
        raise BenchError(
            f"--prompt_lengths: {length} leaves no room for text besides the model's template of "
            f"{len(head) + len(tail)} tokens; give a longer length"
        )
    filler = list(pair.tokenizer(text, add_special_tokens=False).input_ids)
    return head + (filler * -(-room // len(filler)))[:room] + tail


def frame(pair: LoadedPair, *, task: bool = True) -> tuple[list[int], list[int]]:
    """The tokens before and after a user's text; with `task` the text is followed by a request for a long answer."""
    tokenizer = pair.tokenizer
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": _MARKER + (_CHAT_TASK if task else "")}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **pair.template)
        before, after = text.split(_MARKER)
        return (
            tokenizer(before, add_special_tokens=False).input_ids,
            tokenizer(after, add_special_tokens=False).input_ids,
        )
    word = tokenizer("a", add_special_tokens=False).input_ids
    framed = tokenizer("a").input_ids
    start = next((i for i in range(len(framed)) if framed[i : i + len(word)] == word), 0)
    asked = tokenizer(_ENCODER_TASK, add_special_tokens=False).input_ids if task and pair.encoder_decoder else []
    return framed[:start] + asked, framed[start + len(word) :]


def _dialogue(pair: LoadedPair, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """A dialogue up to the last turn, in the embedded pairs' format, in a chat template, or as plain text."""
    tokenizer = pair.tokenizer
    if pair.target_name in embedded.names():
        example = embedded.Example(subtask="multi-turn", turns=tuple(turns), references=("",) * len(turns))
        last = len(turns) - 1
        return list(
            embedded.prompt_ids(tokenizer, example, encoder=pair.encoder_decoder, turn=last, previous_answers=answers)
        )
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **pair.template)
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    text = turns[0] + "".join(f"\n{answer}\n{turn}" for answer, turn in zip(answers, turns[1:], strict=True))
    return list(tokenizer(text).input_ids)
