"""What a round drafts, by the chances of drafts and by earlier rounds: no other choice brings more per second."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.lengths.chances import MOST_WEIGHT, DraftChances, Step, of_copies
from hf_specdec.lengths.choice import Choice, best_choice
from hf_specdec.lengths.history import REMEMBERED, LengthHistory
from hf_specdec.rules.round_statistics import Round


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


def test_chances_are_learned_by_match_and_by_what_followed() -> None:
    """Each situation alone; later tokens outweigh earlier ones."""
    chances = of_copies()
    short, long, unsure = (Step(5, *step).situation for step in ((1, 1, 1), (9, 1, 1), (1, 1, 3)))
    before = chances[long], chances[unsure]
    assert before[1] < chances[short] < before[0]
    for _ in range(1000):
        chances.learn(short, is_right=True)
    assert chances[short] > 0.99 and (chances[long], chances[unsure]) == before
    for _ in range(int(2 * MOST_WEIGHT)):
        chances.learn(short, is_right=False)
    assert chances[short] < 0.2


def test_a_call_begins_with_what_earlier_ones_learned_and_soon_outweighs_it() -> None:
    """However many texts had no copies that were right, a few that are count."""
    chances, step = of_copies(), Step(5, 3, 1, 1).situation
    fresh = chances[step]
    for _ in range(6):
        chances.begin()
        for _ in range(200):
            chances.learn(step, is_right=False)
    chances.begin()
    earlier = chances[step]
    assert earlier < fresh / 2
    for _ in range(10):
        chances.learn(step, is_right=True)
    assert chances[step] > 0.5
    chances.begin()
    assert earlier < chances[step] < 0.4


def test_a_position_is_like_the_one_before_until_it_is_seen() -> None:
    chances = DraftChances()
    for _ in range(50):
        chances.learn_draft(2, 4, 1.0)
    reach = list(chances.reach())
    assert reach[0] > 0.95 and reach[1] > 0.9 and reach[2] < 0.1
    assert len(reach) == MAX_ASSISTANT_TOKENS and all(a >= b for a, b in pairwise(reach))


def test_a_text_that_is_harder_at_first_tokens_is_harder_at_later_ones() -> None:
    """Though these are never reached in it, and were always right in earlier calls."""
    chances = DraftChances()
    for _ in range(50):
        chances.learn_draft(8, 8, 1.0)
    chances.begin()
    assert list(chances.reach())[7] > 0.9
    for _ in range(5):
        chances.fade()
        chances.learn_draft(0, 8, 1.0)
    first, second, *_ = chances.reach()
    assert first < 0.65 and second < 0.8 * first


def test_rows_of_a_batch_count_as_one_together() -> None:
    alone, batch = DraftChances(), DraftChances()
    alone.learn_draft(1, 4, 1.0)
    for _ in range(4):
        batch.learn_draft(1, 4, 0.25)
    assert list(batch.reach()) == pytest.approx(list(alone.reach()))


def finished(drafted: int, seconds: float, drafting: float = 0.0, catch_up: float = 0.0) -> Round:
    steps, whole = drafted if drafting else 0, drafting + seconds
    return Round((drafted,), (0,), (1,), (0.0,), steps, drafted + 1, drafting, seconds, whole, catch_up)


def test_a_catch_up_pass_is_a_trial_s_price_and_no_step_s() -> None:
    """It costs as much for one token as for many, which nothing but a round that made one can tell."""
    known = LengthHistory()
    known.learn(finished(0, 1.0))
    before = known.price(2.0)
    for _ in range(3):
        known.learn(finished(2, 1.0, drafting=0.8, catch_up=0.6), 2)
    assert known.seconds(0, 2) == pytest.approx(1.0 + 0.2)
    assert known.price(2.0) > known.price(1.0) + 0.5 > before
    assert known.price(1000.0) > known.price(2.0)


def test_passes_that_are_being_recorded_teach_no_times() -> None:
    """They take longer than later ones, so that their length would not be tried again. Settled ones are the control."""
    known, control = LengthHistory(), LengthHistory()
    for one, settled in ((known, False), (control, True)):
        one.learn(finished(0, 1.0))
        one.learn(replace(finished(2, 3.0), settled=settled))
    assert known.seconds(2, 0) < 1.1 < 1.4 < control.seconds(2, 0)


def test_what_no_longer_runs_is_forgotten() -> None:
    """Passes may be recorded since, or have stalled: what was slow once would never be tried again."""
    known = LengthHistory()
    known.learn(finished(0, 1.0))
    for _ in range(5):
        known.learn(finished(4, 9.0, drafting=4.0), 4)
    assert known.seconds(0, 4) > 12.0
    for _ in range(REMEMBERED + 1):
        known.learn(finished(2, 1.1, drafting=0.2), 2)
    assert known.seconds(0, 4) < 1.8


def test_rounds_without_drafts_forget_nothing_but_a_trial_s_times() -> None:
    known = LengthHistory()
    for drafted, seconds in ((0, 1.0), (1, 5.0), (4, 9.0)):
        for _ in range(3):
            known.learn(finished(drafted, seconds, drafting=1.0 * (drafted > 0)), drafted)
    for _ in range(3 * REMEMBERED):
        known.learn(finished(0, 1.0))
    assert known.seconds(0, 1) == 6.0 and known.seconds(0, 4) == 10.0
    known.begin_trial()
    assert known.seconds(0, 1) < 4.0 and known.seconds(0, 4) == 10.0


def test_lengths_that_never_ran_lie_on_straight_lines() -> None:
    """Between known ones; beyond them, a second token's cost is not that of each further one."""
    known = LengthHistory()
    for _ in range(5):
        for drafted, seconds in ((0, 1.0), (2, 1.6), (4, 1.7), (8, 1.9)):
            known.learn(finished(drafted, seconds))
    assert known.seconds(6, 0) == pytest.approx(1.8) and known.seconds(1, 0) == pytest.approx(1.3)
    assert known.seconds(16, 0) == pytest.approx(2.3, abs=0.05)


@pytest.mark.parametrize(("ran", "most"), [((0,), 1.8), ((0, 8), 1.6)])
def test_the_first_pass_of_a_width_may_be_a_stall(ran: tuple[int, ...], most: float) -> None:
    """It counts as half as much again as was expected, at most; passes after it count as they are."""
    known = LengthHistory()
    for drafted in ran * 3:
        known.learn(finished(drafted, 1.0 + drafted / 100))
    known.learn(finished(4, 10.0))
    assert known.seconds(4, 0) < most
    for _ in range(3):
        known.learn(finished(4, 10.0))
    assert known.seconds(4, 0) == 10.0


def test_the_draft_s_share_of_the_prompts_pass_tells_a_step_s_time() -> None:
    known = LengthHistory()
    known.learn_first(Round((1,), (0,), (1,), (0.0,), 1, 101, 0.6, 2.0, 2.6))
    known.learn(finished(0, 1.0))
    assert known.seconds(0, 2) == pytest.approx(1.08 + 0.6)
