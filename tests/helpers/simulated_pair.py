"""Simulated rounds of a pair: passes take what a `Machine` says, and no model runs."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from hf_specdec.lengths.auto_length import AutoLength
from hf_specdec.lengths.history import LengthHistory
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.rules.round_statistics import Round

PROMPT = 200


@dataclass(frozen=True)
class Machine:
    """A simulated pair; one plain step of the target takes 1.

    Args:
        step: seconds of a draft step.
        acceptance: chance that a token is accepted, from the tokens decoded so far and the draft position.
        wider: what each further token adds to a pass, as a share of it.
        jump: what a pass over several tokens takes longer than one over a single token, besides `wider`.
        narrow: behind so many tokens each adds five times as much.
        beginning: what a draft's first pass takes longer, in draft steps.
        rows: batch size.
        noise: spread of all times; one in fifty passes stalls for three times as long.
    """

    step: float
    acceptance: Callable[[int, int], float]
    wider: float = 0.03
    jump: float = 0.0
    narrow: int = 10**6
    beginning: float = 0.0
    rows: int = 1
    noise: float = 0.05

    def decode(self, rule: StopRule, tokens: int, seed: int, warm_up: int = 1) -> tuple[float, list[Round]]:
        """Mean time of a token of each row after the first `warm_up` ones, up to `tokens`, and all rounds."""
        chance = random.Random(seed)
        rounds: list[Round] = []
        texts, unread, total, timed = [0] * self.rows, PROMPT, 0.0, 0.0
        while min(texts) < tokens:
            limit, first = rule.limit, not rounds
            width = limit + (PROMPT if first else 1)
            accepted = [self._accepted(chance, text, limit) for text in texts]
            steps = limit + self.beginning + self.wider * max(unread - 1, 0)
            drafting = self.step * steps * self._jitter(chance) if limit else 0.0
            beyond = 0 if first else max(width - self.narrow, 0)
            verifying = 1 + self.jump * (width > 1) + self.wider * (width - 1 + 4 * beyond)
            verifying *= self._jitter(chance)
            unread = 1 if limit else unread + 1
            finished = Round(
                drafted=(limit,) * self.rows,
                accepted=tuple(accepted),
                new_tokens=tuple(n + 1 for n in accepted),
                overlap=(0.0,) * self.rows,
                draft_steps=limit,
                width=width,
                draft_seconds=drafting,
                verify_seconds=verifying,
                seconds=drafting + verifying,
            )
            texts = [text + n + 1 for text, n in zip(texts, accepted, strict=True)]
            rounds.append(finished)
            rule.observe(finished)
            if min(texts) - min(finished.new_tokens) >= warm_up:
                total += finished.seconds
                timed += sum(finished.new_tokens) / self.rows
        return total / timed, rounds

    def _accepted(self, chance: random.Random, text: int, limit: int) -> int:
        n = 0
        while n < limit and chance.random() < self.acceptance(text, n):
            n += 1
        return n

    def _jitter(self, chance: random.Random) -> float:
        return (3.0 if chance.random() < 0.02 else 1.0) * chance.lognormvariate(0.0, self.noise)


class Preparing(AutoLength):
    """As prepared rounds use it: a length is ready once it was chosen."""

    def __init__(self, known: LengthHistory | None = None) -> None:
        super().__init__(known)
        self.made: set[int] = set()
        self.use_prepared(self.made.__contains__)

    def observe(self, finished: Round) -> None:
        self.made.add(finished.draft_steps)
        super().observe(finished)


def flat(share: float) -> Callable[[int, int], float]:
    return lambda text, position: share


def mean_time(
    machine: Machine, make: Callable[[], StopRule], tokens: int = 128, seeds: int = 40, warm_up: int = 1
) -> float:
    return sum(machine.decode(make(), tokens, seed, warm_up)[0] for seed in range(seeds)) / seeds
