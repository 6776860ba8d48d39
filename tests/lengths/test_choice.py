"""What a round drafts: no other choice brings more tokens per second."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from hf_specdec.lengths.choice import Choice, best_choice


@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_brings_more_tokens_for_its_time(seed: int) -> None:
    """Compared with every number of copied tokens, and every set of rows in which the model drafts.

    Where nothing pays, the model drafts as it was told to.
    """
    chance = random.Random(seed)
    copies = {row: sorted((chance.random() for _ in range(chance.randrange(6))), reverse=True) for row in (0, 2, 3)}
    steps, drafted, wider = chance.choice((0, 1, 4)), 3 * chance.random(), chance.choice((0.02, 0.1, 0.4))

    def seconds(copied: int, steps: int) -> float:
        return 1.0 + wider * max(copied, steps) + 0.1 * steps

    def rate(made: Choice) -> float:
        tokens = sum(1 + (drafted if row in made.modelled else sum(copies[row][: made.copied])) for row in copies)
        return tokens / seconds(made.copied, steps if made.modelled else 0)

    every = [
        Choice(count, rows)
        for count in range(6)
        for some in range(4 if steps else 1)
        for rows in combinations(copies, some)
    ]
    most = max(map(rate, every))
    if steps and most == 3.0:
        most = rate(Choice(0, frozenset(copies)))
    assert rate(best_choice(copies, drafted, steps, seconds, range(1, 17))) == pytest.approx(most)


def test_a_model_that_was_told_to_draft_drafts_unless_copies_are_better() -> None:
    """Also where nothing would be faster: it is a fixed length, or a probe."""
    dear = {
        "drafted": 0.0,
        "steps": 4,
        "seconds": lambda copied, steps: 1.0 + steps + 0.1 * copied,
        "counts": range(1, 17),
    }
    assert best_choice({0: [], 1: [0.05]}, **dear) == Choice(0, frozenset({0, 1}))
    assert best_choice({0: [], 1: [0.9]}, **dear)[:2] == (1, ())


def test_what_copies_save_is_the_time_that_their_tokens_would_have_taken() -> None:
    """Two of three tokens are expected, which plain rounds of 1.0 would make in 3.0."""
    choice = best_choice({0: [0.9, 0.7, 0.4]}, 0.0, 0, lambda copied, steps: 1.0 + 0.1 * copied, range(1, 17))
    assert choice.copied == 3 and choice.saved == pytest.approx(3.0 - 1.3)


def test_nothing_found_is_worth_nothing() -> None:
    for copies in ({}, {0: [], 1: []}):
        assert best_choice(copies, 0.0, 0, lambda copied, steps: 1.0 + copied, range(1, 17)) == Choice(0, ())


def test_counts_are_those_that_rounds_are_prepared_for() -> None:
    """The first that holds all that was found may be longer than it; none beyond is looked at."""
    reach = [0.9, 0.9, 0.9]

    def seconds(copied: int, steps: int) -> float:
        assert copied < 8
        return 1.0 + 0.1 * copied

    assert best_choice({0: reach}, 0.0, 0, seconds, (1, 2, 4, 8)).copied == 4
    assert best_choice({0: reach}, 0.0, 0, seconds, (1, 2)).copied == 2
