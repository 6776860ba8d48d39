"""Simulated calls of drafters that copy: texts, what a draft model gets right, and times, all seeded; no model runs."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_specdec.drafting.drafter import BaseDrafter, Drafter, DraftProposal, NoDrafter
from hf_specdec.drafting.hybrid import HybridDrafter
from hf_specdec.drafting.suffix import Copy, SuffixDrafter
from hf_specdec.lengths.auto_length import AutoLength
from hf_specdec.lengths.history import LengthHistory
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.rules.round_statistics import Round

PROMPT, VOCABULARY, MOST = 60, 1000, 16


@dataclass(frozen=True)
class Texts:
    """The rows of a call: prompt and answer, and at which places of the answer the draft model is right."""

    tokens: list[list[int]]
    right: list[list[bool]]


@dataclass(frozen=True)
class World:
    """A pair on a machine, and the texts that it writes; a plain step takes 1.

    Args:
        right: the chance that the draft model is right, at each place.
        spans: the chance that a place begins a copy of 5 to 30 tokens from anywhere before it.
        step: the time of a draft step.
        wider, jump: what each further token adds to a pass, and what the second one adds besides.
        look_up: the time of a row's look-up.
        rows: of a call.
        tokens: of an answer.
    """

    right: float
    spans: float
    step: float
    wider: float = 0.05
    jump: float = 0.0
    look_up: float = 0.0
    rows: int = 1
    tokens: int = 128

    def call(self, make: Callable[[Texts], Drafter], seed: int) -> tuple[float, list[Round]]:
        """Time per token of a row after the first round, and the rounds. Times vary by 5%; one in fifty triples."""
        texts, chance = texts_of(self, seed), random.Random(seed + 1)
        drafter, rounds = make(texts), list[Round]()
        end = PROMPT + self.tokens
        ids = torch.tensor([[*text, *[0] * MOST] for text in texts.tokens])
        lengths, unread, timed, seconds = [PROMPT] * self.rows, PROMPT, 0.0, 0.0
        while min(lengths) < end:
            room = [max(end - length - 1, 0) for length in lengths]
            drafter.retain([row for row, length in enumerate(lengths) if length < end])
            looked = Suffix.looked
            proposal = drafter.propose(ids.clone(), lengths, room)
            accepted = tuple(map(self._agreeing, texts.tokens, lengths, proposal.tokens.tolist(), proposal.lengths))
            new = tuple(min(n + 1, end - length) for n, length in zip(accepted, lengths, strict=True))
            width = 1 + (proposal.tokens.shape[1] if rounds else PROMPT)
            jitter = (3.0 if chance.random() < 0.02 else 1.0) * chance.lognormvariate(0.0, 0.05)
            drafting = self.step * (proposal.steps + self.wider * unread) * jitter if proposal.steps else 0.0
            drafting += self.look_up * (Suffix.looked - looked)
            verifying = (1.0 + self.jump * (width > 1) + self.wider * (width - 1)) * jitter
            unread = 0 if proposal.steps else unread + max(new)
            rounds.append(
                Round(
                    proposal.lengths, accepted, new, (0.0,) * self.rows, proposal.steps, width, drafting, verifying,
                    drafting + verifying, room=tuple(room),
                )
            )  # fmt: skip
            drafter.observe(rounds[-1])
            lengths = [length + n for length, n in zip(lengths, new, strict=True)]
            if len(rounds) > 1:
                seconds += rounds[-1].seconds
                timed += sum(new) / self.rows
        return seconds / timed, rounds

    @staticmethod
    def _agreeing(text: Sequence[int], length: int, drafts: Sequence[int], count: int) -> int:
        rest = text[length : length + count]
        wrong = (at for at, (draft, token) in enumerate(zip(drafts, rest, strict=False)) if draft != token)
        return next(wrong, len(rest))

    def speed(self, make: Callable[[Texts], Drafter], calls: int = 10) -> float:
        """Tokens of a row per plain step, over all calls."""
        return calls / sum(self.call(make, seed)[0] for seed in range(calls))


@cache
def texts_of(world: World, seed: int) -> Texts:
    """Tokens are as unequally frequent as words, so that single ones match by chance again and again."""
    chance, rows = random.Random(seed), Texts([], [])
    for _ in range(world.rows):
        text: list[int] = []
        while len(text) < PROMPT + world.tokens:
            if len(text) > PROMPT and chance.random() < world.spans:
                begin = chance.randrange(len(text))
                text += text[begin : begin + chance.randint(5, 30)]
            else:
                text.append(int(VOCABULARY ** chance.random()))
        rows.tokens.append(text[: PROMPT + world.tokens])
        rows.right.append([chance.random() < world.right for _ in range(world.tokens)])
    return rows


class Suffix(SuffixDrafter):
    """Counts rows that are looked up, in all calls."""

    looked = 0

    def _foreseen(self, row: Any) -> Copy:
        Suffix.looked += 1
        return super()._foreseen(row)


class Model(BaseDrafter):
    """A draft model that is right where the texts say so, and not after its first mistake."""

    def __init__(self, texts: Texts, rule: StopRule) -> None:
        super().__init__(rule)
        self.texts = texts

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        counts = tuple(min(self.rule.limit, space) for space in room)
        drafts = torch.zeros(len(counts), max(counts), dtype=torch.long)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            right = self.texts.right[row][length - PROMPT : length - PROMPT + count]
            known = right.index(False) if False in right else len(right)
            drafts[row, :known] = torch.tensor(self.texts.tokens[row][length : length + known])
        return DraftProposal(drafts, counts, steps=max(counts))


def plain(texts: Texts) -> Drafter:
    return NoDrafter()


def model(tokens: int) -> Callable[[Texts], Drafter]:
    return lambda texts: Model(texts, StopRule(tokens))


def suffix(tokens: int) -> Callable[[Texts], Drafter]:
    return lambda texts: Suffix(StopRule(tokens), vocabulary=VOCABULARY)


def hybrid(tokens: int) -> Callable[[Texts], Drafter]:
    def make(texts: Texts) -> Drafter:
        rule = StopRule(tokens)
        return HybridDrafter(Suffix(rule, vocabulary=VOCABULARY), Model(texts, rule), rule)

    return make


def auto(*, has_model: bool = True) -> Callable[[Texts], Drafter]:
    """`drafter="auto"` in calls that follow one another."""
    known = LengthHistory()

    def make(texts: Texts) -> Drafter:
        copies = Suffix(StopRule(MOST), vocabulary=VOCABULARY, known=known)
        if not has_model:
            return copies
        rule = AutoLength(known)
        return HybridDrafter(copies, Model(texts, rule), rule)

    return make
