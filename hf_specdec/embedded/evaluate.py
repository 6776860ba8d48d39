"""Scores on the held-out split, and how many of a draft's tokens its target accepts in greedy decoding."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.embedded.corpus.examples import METRIC, Example
from hf_specdec.embedded.corpus.prompts import prompt_ids

LOOKAHEAD = 4
_BATCH = 32


@dataclass(frozen=True)
class Answer:
    """One greedy answer: the prompt's ids, the new tokens up to and including EOS, and the text."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Agreement:
    """Token counts of greedy speculation; `checked` counts the positions up to each round's first rejection."""

    drafted: int = 0
    accepted: int = 0
    checked: int = 0
    rounds: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.drafted + other.drafted, self.accepted + other.accepted,
                         self.checked + other.checked, self.rounds + other.rounds)  # fmt: skip

    @property
    def acceptance(self) -> float:
        """Accepted drafted tokens / drafted tokens."""
        return self.accepted / max(1, self.drafted)

    @property
    def alpha(self) -> float:
        """Share of the checked positions at which the target agrees."""
        return self.accepted / max(1, self.checked)


def _padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids `[B, T]` and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@torch.no_grad()
def greedy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], limit: int = 96
) -> list[Answer]:
    """Greedy answers of at most `limit` tokens to prompts given as ids."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, Answer] = {}
    for begin in range(0, len(order), _BATCH):
        chosen = order[begin : begin + _BATCH]
        ids, mask = _padded([prompts[i] for i in chosen], tokenizer.pad_token_id)
        out = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device),
                             max_new_tokens=limit, do_sample=False)  # fmt: skip
        skipped = 1 if model.config.is_encoder_decoder else ids.shape[1]
        for i, row in zip(chosen, out[:, skipped:].tolist(), strict=True):
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            text = tokenizer.decode(row[:end], skip_special_tokens=True)
            answers[i] = Answer(tuple(prompts[i]), tuple(row[:end]), text)
    return [answers[i] for i in range(len(prompts))]


def answer_examples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    length: int | None = None,
) -> list[list[Answer]]:
    """Answers to every turn of every example; the model's earlier answers are part of later prompts."""
    dialogues: list[list[Answer]] = [[] for _ in examples]
    for turn in range(max(len(example.turns) for example in examples)):
        chosen = [i for i, example in enumerate(examples) if turn < len(example.turns)]
        prompts = [
            prompt_ids(tokenizer, examples[i], length, encoder=model.config.is_encoder_decoder, turn=turn,
                       previous_answers=[answer.text for answer in dialogues[i]])
            for i in chosen
        ]  # fmt: skip
        for i, answer in zip(chosen, greedy(model, tokenizer, prompts), strict=True):
            dialogues[i].append(answer)
    return dialogues


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F1 over lower-case alphanumeric words (what `rouge_score` computes without stemming)."""
    left, right = (re.findall(r"[a-z0-9]+", text.lower()) for text in (prediction, reference))
    if not left or not right:
        return float(left == right)
    row = [0] * (len(right) + 1)
    for word in left:
        previous = 0
        for j, other in enumerate(right, 1):
            previous, row[j] = row[j], previous + 1 if word == other else max(row[j], row[j - 1])
    return 2 * row[-1] / (len(left) + len(right))


def facts(prediction: str, reference: str) -> float:
    """Share of a reference's statements found word for word in the answer (as `bench.figures.quality.facts`).

    Punctuation marks and "and" separate statements.
    """
    said = " ".join(prediction.split())
    wanted = [" ".join(part.split()) for part in re.split(r"[.,;:!?](?:\s+|$)|\s+and\s+", reference) if part.strip()]
    hits = [re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", said) is not None for fact in wanted]
    return sum(hits) / len(hits) if hits else float(not said)


def exact_match(prediction: str, reference: str) -> float:
    """1 for an answer that equals its reference, ignoring blanks around it."""
    return float(prediction.strip() == reference)


# Measures by a subtask's metric. Answers that can be worded in several ways are also judged by their statements.
_MEASURES: dict[str, dict[str, Callable[[str, str], float]]] = {
    "rougeL": {"rougeL": rouge_l, "facts": facts},
    "exact_match": {"exact_match": exact_match},
}


def scores(example: Example, answers: Sequence[Answer]) -> dict[str, float]:
    """Means over the turns, between 0 and 1: the subtask's metric, then `facts` for free answers."""
    pairs = [(answer.text, reference) for answer, reference in zip(answers, example.references, strict=True)]
    return {
        name: sum(measure(*pair) for pair in pairs) / len(pairs)
        for name, measure in _MEASURES[METRIC[example.subtask]].items()
    }


def score(example: Example, answers: Sequence[Answer]) -> float:
    """Mean over the turns of the subtask's metric, between 0 and 1."""
    return scores(example, answers)[METRIC[example.subtask]]


@torch.no_grad()
def agreements(
    draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, answers: Sequence[Answer]
) -> list[Agreement]:
    """Greedy acceptance of `draft` on each of its target's greedy answers.

    One forward pass over the answers is enough: up to the first rejected token of a round, the draft has read the
    target's own text.
    """
    found: list[Agreement] = []
    for begin in range(0, len(answers), _BATCH):
        batch = answers[begin : begin + _BATCH]
        for answer, agrees in zip(batch, _argmax_agrees(draft, tokenizer, batch), strict=True):
            found.append(simulate_rounds(agrees[: len(answer.tokens)]))
    return found


def _argmax_agrees(
    draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, answers: Sequence[Answer]
) -> list[list[bool]]:
    """For each answer, whether the draft's argmax is the answer's token, position by position."""
    pad, width = tokenizer.pad_token_id, max(len(answer.tokens) for answer in answers)
    tokens = torch.tensor([[*a.tokens, *[pad] * (width - len(a.tokens))] for a in answers]).to(draft.device)
    ids, mask = (t.to(draft.device) for t in _padded([answer.prompt for answer in answers], pad))
    if draft.config.is_encoder_decoder:
        shifted = torch.cat([torch.full_like(tokens[:, :1], draft.config.decoder_start_token_id), tokens[:, :-1]], 1)
        logits = draft(input_ids=ids, attention_mask=mask, decoder_input_ids=shifted).logits
    else:
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = draft(input_ids=torch.cat([ids, tokens], 1), attention_mask=mask, position_ids=positions,
                       logits_to_keep=width + 1).logits[:, :-1]  # fmt: skip
    return (logits.argmax(-1) == tokens).tolist()


def simulate_rounds(agrees: Sequence[bool], lookahead: int = LOOKAHEAD) -> Agreement:
    """The counts of greedy speculation, where `agrees[i]` says whether the draft predicts token i.

    A round drafts `lookahead` tokens, the last round only what remains. The target's own token follows the accepted
    ones.
    """
    total, position = Agreement(), 0
    while position < len(agrees):
        drafted = list(agrees[position : position + lookahead])
        accepted = drafted.index(False) if False in drafted else len(drafted)
        checked = min(accepted + 1, len(drafted))
        total += Agreement(len(drafted), accepted, checked, 1)
        position += accepted + 1
    return total
