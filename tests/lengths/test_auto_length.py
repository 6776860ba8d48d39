"""The length that pays, on simulated rounds: a floor where drafting can't pay, near the best length where it can."""

import pytest
from helpers.simulated_pair import Machine, Preparing, flat, mean_time

from hf_specdec.lengths.auto_length import PREPARED_LENGTHS, AutoLength
from hf_specdec.lengths.history import TIMES_KEPT, LengthHistory
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.rules.round_statistics import Round


@pytest.mark.parametrize("make", [AutoLength, Preparing])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("step", [0.1, 0.5, 1.0])
def test_128_tokens_keep_the_speed_of_plain_decoding(step: float, share: float, make: type[AutoLength]) -> None:
    """A draft as large as its target, one that never agrees, and what lies between; noise included."""
    # The mean of 40 runs is itself uncertain by half a percent.
    machine = Machine(step, flat(share))
    assert mean_time(machine, lambda: StopRule(0)) / mean_time(machine, make) >= 0.97 - 0.005


def test_a_fixed_length_does_not_keep_it() -> None:
    """Control: on the same machine a fixed length loses a third and more."""
    machine = Machine(1.0, flat(0.6))
    assert mean_time(machine, lambda: StopRule(0)) / mean_time(machine, lambda: StopRule(4)) < 0.67


@pytest.mark.parametrize(
    "machine",
    [
        Machine(0.05, flat(0.6)),
        Machine(0.1, flat(0.8)),
        Machine(0.1, flat(0.95)),
        Machine(0.3, flat(0.8)),
        Machine(0.1, flat(0.7), wider=0.2),
        Machine(0.05, flat(0.8), wider=0.02, jump=0.15),
        Machine(0.05, flat(0.8), wider=0.01, jump=0.5),
        Machine(0.1, flat(0.8), wider=0.1, rows=4),
        Machine(0.1, lambda text, position: 0.9 - 0.15 * position),
    ],
    ids=[
        "cheap",
        "good",
        "excellent",
        "dear",
        "wide passes cost",
        "several tokens cost alike",
        "a second token costs half a pass",
        "batch",
        "worse by position",
    ],
)
def test_a_good_draft_comes_near_the_best_fixed_length(machine: Machine) -> None:
    """Within 5% after the first 100 tokens; within 10% where only a few lengths may be had."""
    fixed = [mean_time(machine, lambda n=n: StopRule(n), 400, 12, 100) for n in (1, 2, 3, 4, 6, 8, 16)]
    assert min(fixed) / mean_time(machine, AutoLength, 400, 20, 100) > 0.95
    assert min(fixed) / mean_time(machine, Preparing, 400, 20, 100) > 0.90


def test_drafting_stops_where_the_text_turns_hard_and_returns_where_it_turns_easy() -> None:
    def share(text: int, position: int) -> float:
        return 0.0 if 150 <= text < 300 else 0.9

    lengths = {"easy": [], "hard": [], "late": []}
    for seed in range(10):
        text, (_, rounds) = 0, Machine(0.1, share).decode(AutoLength(), 600, seed)
        for finished in rounds[3:]:
            text += finished.new_tokens[0]
            kind = "easy" if text < 150 else "hard" if 200 < text < 300 else "late" if text > 450 else ""
            lengths.setdefault(kind, []).append(finished.drafted[0])
    means = {kind: sum(seen) / len(seen) for kind, seen in lengths.items()}
    assert means["easy"] > 3 and means["late"] > 3 and means["hard"] < 0.5
    assert max(lengths["hard"]) > 0, "it tries"


def test_trials_become_rarer() -> None:
    rule = AutoLength()
    _, rounds = Machine(0.5, flat(0.0), noise=0.0).decode(rule, 2000, seed=0)
    drafted = [n for n, finished in enumerate(rounds) if finished.drafted[0]]
    assert sum(n < 100 for n in drafted) <= 6
    lost = sum(finished.seconds - 1.0 for finished in rounds[1:] if finished.drafted[0])
    assert lost < 0.02 * len(rounds)


def test_later_calls_begin_with_what_earlier_ones_have_taught() -> None:
    """Short answers come as fast as at the best fixed length; without that knowledge they take a tenth longer."""
    machine, known, fresh, taught = Machine(0.3, flat(0.8)), LengthHistory(), [], []
    for seed in range(600):
        fresh.append(machine.decode(AutoLength(), 30, seed)[0])
        taught.append(machine.decode(AutoLength(known), 30, seed)[0])
    best = min(mean_time(machine, lambda n=n: StopRule(n), 30, 600) for n in (1, 2, 3, 4, 6))
    assert sum(taught) / 600 < 1.04 * best < 0.97 * sum(fresh) / 600


def test_many_short_calls_notice_that_plain_decoding_is_faster_than_it_was_timed() -> None:
    """It was timed while the machine was busy; no single call is long enough to time it again."""
    machine, known = Machine(0.6, flat(0.8), jump=0.5), LengthHistory()
    machine.decode(AutoLength(known), 400, 0)
    for _ in range(TIMES_KEPT):
        known.learn(Round((0,), (0,), (1,), (0.0,), 0, 1, 0.0, 2.0, 2.0))
    calls = [machine.decode(AutoLength(known), 20, seed)[1] for seed in range(100)]
    drafted = [sum(finished.draft_steps > 0 for finished in rounds[1:]) for rounds in calls]
    assert sum(drafted[-20:]) < 0.5 * sum(drafted[:20])


@pytest.mark.parametrize("make", [AutoLength, Preparing])
@pytest.mark.parametrize(("step", "wider", "rows", "gain"), [(0.1, 0.03, 1, 1.4), (0.11, 0.2, 8, 1.15)])
def test_a_call_in_which_drafting_stalled_does_not_keep_later_calls_from_it(
    step: float, wider: float, rows: int, gain: float, make: type[AutoLength]
) -> None:
    """Rounds with drafts took five times as long; short calls have no credit for trials that seem so dear."""
    usual = Machine(step, flat(0.8), wider=wider, jump=0.1, rows=rows)
    stalled = Machine(5 * step, flat(0.8), wider=5 * wider, jump=4.5, rows=rows)
    plain, later = mean_time(usual, lambda: StopRule(0), 48), []
    for seed in range(15):
        known = LengthHistory()
        assert stalled.decode(make(known), 48, seed)[0] > plain, "drafting did not pay"
        times = [usual.decode(make(known), 48, 100 * seed + call)[0] for call in range(12)]
        later.append(plain / (sum(times[6:]) / 6))
    assert sum(later) / len(later) > gain


def test_trials_of_one_call_lose_little_however_long_earlier_calls_were() -> None:
    """Earlier calls leave a credit that would be a quarter of this one's time."""
    known = LengthHistory()
    known.credit = 100.0
    machine = Machine(0.5, flat(0.0), noise=0.0)
    for seed in range(5):
        _, rounds = machine.decode(AutoLength(known), 128, seed)
        assert sum(finished.seconds - 1.0 for finished in rounds[1:] if finished.draft_steps) < 0.04 * 128


def test_a_draft_that_never_pays_costs_many_short_calls_no_more_than_a_long_one() -> None:
    machine, known = Machine(0.5, flat(0.2)), LengthHistory()
    calls = [machine.decode(AutoLength(known), 30, seed) for seed in range(60)]
    plain = [machine.decode(StopRule(0), 30, seed)[0] for seed in range(60)]
    assert sum(plain) / sum(time for time, _ in calls) > 0.97
    assert any(one.draft_steps for _, rounds in calls[30:] for one in rounds[1:]), "it still tries"


def test_prepared_lengths_are_few_and_none_is_made_that_cannot_pay() -> None:
    """A draft that never agrees has the length of the first round made, and plain rounds; trials make no other."""
    for machine, most, on_average in ((Machine(0.3, flat(0.0)), 2, 2.0), (Machine(0.1, flat(0.8)), 6, 5.3)):
        made = []
        for seed in range(20):
            rule = Preparing()
            _, rounds = machine.decode(rule, 400, seed)
            assert rule.made <= set(PREPARED_LENGTHS) and rounds[0].draft_steps == 1
            made.append(len(rule.made))
        assert max(made) <= most and sum(made) / len(made) <= on_average
    tried = [
        finished for finished in Machine(0.05, flat(0.0)).decode(Preparing(), 400, 0)[1][20:] if finished.draft_steps
    ]
    assert tried and {finished.draft_steps for finished in tried} == {1}


def test_a_much_longer_length_is_not_prepared_on_a_guess() -> None:
    """Narrow passes and the first lengths promise a lot of sixteen drafts, whose pass is no narrow one any more."""
    machine = Machine(0.12, flat(0.85), wider=0.05, narrow=10, beginning=1.0)
    fixed = [mean_time(machine, lambda n=n: StopRule(n), 400, 12, 100) for n in (1, 2, 4, 8, 16)]
    assert fixed[4] > 1.3 * min(fixed)
    made = [set[int]() for _ in range(40)]
    for seed, lengths in enumerate(made):
        rule = Preparing()
        machine.decode(rule, 400, seed)
        lengths |= rule.made
    assert all(lengths & {4, 8} for lengths in made)
    assert sum(16 in lengths for lengths in made) <= 12  # where luck at first is taken for acceptance
    assert min(fixed) / mean_time(machine, Preparing, 400, 20, 100) > 0.93


@pytest.mark.parametrize("make", [AutoLength, Preparing])
@pytest.mark.parametrize("step", [0.1, 0.3, 0.5])
def test_128_hard_tokens_after_easy_texts_lose_little(step: float, make: type[AutoLength]) -> None:
    """At most 5%, though the draft, which was right before, never is any more and so starts with long drafts."""

    def later_call() -> AutoLength:
        known = LengthHistory()
        Machine(step, flat(0.9)).decode(make(known), 128, 0)
        return make(known)

    machine = Machine(step, flat(0.0))
    assert mean_time(machine, lambda: StopRule(0)) / mean_time(machine, later_call) >= 0.95


def test_rounds_without_times_are_learnt_from_as_far_as_they_go() -> None:
    """transformers' own loop passes no times on."""
    rule = AutoLength()
    for _ in range(20):
        n = rule.limit
        rule.observe(Round((n,), (n,), (n + 1,), (0.0,), n, n + 1, 0.0, 0.0, 0.0))
    assert rule.limit > 4
