"""The length that pays, on simulated rounds: a floor where drafting can't pay, near the best length where it can."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, pairwise

import pytest
import torch
from helpers.families import pair, prompts

import hf_specdec
from hf_specdec import SpeculativeDecoding
from hf_specdec.config import MAX_ASSISTANT_TOKENS
from hf_specdec.lengths import auto_length
from hf_specdec.lengths.auto_length import PREPARED_LENGTHS, AutoLength, LengthHistory
from hf_specdec.lengths.estimates import PassTimes, PositionRates
from hf_specdec.lengths.stop_rules import EntropyStop, Fallback, FirstOf, StopRule
from hf_specdec.prepared import cuda_graphs
from hf_specdec.rules.round_statistics import Round

PROMPT = 200


@dataclass(frozen=True)
class Machine:
    """A simulated pair; one plain step of the target takes 1.

    Args:
        step: seconds of a draft step.
        acceptance: chance that a token is accepted, from the tokens decoded so far and the draft position.
        wider: what each further token adds to a pass, as a share of it.
        narrow: behind so many tokens each adds five times as much.
        beginning: what a draft's first pass takes longer, in draft steps.
        rows: batch size.
        noise: spread of all times; one in fifty passes stalls for three times as long.
    """

    step: float
    acceptance: Callable[[int, int], float]
    wider: float = 0.03
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
            verifying = (1 + self.wider * (width - 1 + 4 * beyond)) * self._jitter(chance)
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
        self.use_prepared(self.made)

    def observe(self, finished: Round) -> None:
        self.made.add(finished.draft_steps)
        super().observe(finished)


def flat(share: float) -> Callable[[int, int], float]:
    return lambda text, position: share


def mean_time(
    machine: Machine, make: Callable[[], StopRule], tokens: int = 128, seeds: int = 40, warm_up: int = 1
) -> float:
    return sum(machine.decode(make(), tokens, seed, warm_up)[0] for seed in range(seeds)) / seeds


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
        Machine(0.1, flat(0.8), wider=0.1, rows=4),
        Machine(0.1, lambda text, position: 0.9 - 0.15 * position),
    ],
    ids=["cheap", "good", "excellent", "dear", "wide passes cost", "batch", "worse by position"],
)
def test_a_good_draft_comes_near_the_best_fixed_length(machine: Machine) -> None:
    """Within 5% after the first 100 tokens; within 10% where only a few lengths may be had."""
    fixed = [mean_time(machine, lambda n=n: StopRule(n), 400, 12, 100) for n in (1, 2, 3, 4, 6, 8, 16)]
    assert min(fixed) / mean_time(machine, AutoLength, 400, 20, 100) > 0.95
    assert min(fixed) / mean_time(machine, Preparing, 400, 20, 100) > 0.90


def test_drafting_stops_where_the_text_turns_hard_and_returns_where_it_turns_easy() -> None:
    def share(text: int, position: int) -> float:
        return 0.0 if 150 <= text < 300 else 0.9

    rule = AutoLength()
    _, rounds = Machine(0.1, share).decode(rule, 600, seed=0)
    text, lengths = 0, {"easy": [], "hard": [], "late": []}
    for finished in rounds[3:]:
        text += finished.new_tokens[0]
        kind = "easy" if text < 150 else "hard" if 200 < text < 300 else "late" if text > 450 else ""
        lengths.setdefault(kind, []).append(finished.drafted[0])
    means = {kind: sum(seen) / len(seen) for kind, seen in lengths.items()}
    assert means["easy"] > 3 and means["late"] > 3
    assert means["hard"] < 0.5
    assert max(lengths["hard"]) > 0, "it probes"


def test_probes_become_rarer() -> None:
    rule = AutoLength()
    _, rounds = Machine(0.5, flat(0.0), noise=0.0).decode(rule, 2000, seed=0)
    drafted = [n for n, finished in enumerate(rounds) if finished.drafted[0]]
    assert sum(n < 100 for n in drafted) <= 6
    lost = sum(finished.seconds - 1.0 for finished in rounds[1:] if finished.drafted[0])
    assert lost < 0.02 * len(rounds)


def test_what_the_draft_has_to_read_is_part_of_a_probe_s_cost() -> None:
    """Catching up with a hundred tokens costs more than a probe may: none is made, and one is where it's cheap."""
    probes = {}
    for wider in (0.0, 0.5):
        _, rounds = Machine(0.5, flat(0.0), wider=wider, noise=0.0).decode(AutoLength(), 1500, seed=0)
        probes[wider] = sum(finished.drafted[0] > 0 for finished in rounds[100:])
    assert probes[0.0] > 0 == probes[0.5]


def test_later_calls_begin_with_what_earlier_ones_have_taught() -> None:
    """Short answers come as fast as at the best fixed length; without that knowledge they take a tenth longer."""
    machine, known, fresh, taught = Machine(0.3, flat(0.8)), LengthHistory(), [], []
    for seed in range(100):
        fresh.append(machine.decode(AutoLength(), 30, seed)[0])
        taught.append(machine.decode(AutoLength(known), 30, seed)[0])
    best = min(mean_time(machine, lambda n=n: StopRule(n), 30, 100) for n in (1, 2, 3, 4, 6))
    assert sum(taught) / 100 < 1.03 * best < 0.97 * sum(fresh) / 100


def test_a_draft_that_never_pays_costs_many_short_calls_no_more_than_a_long_one() -> None:
    machine, known = Machine(1.0, flat(0.2)), LengthHistory()
    times = [machine.decode(AutoLength(known), 30, seed)[0] for seed in range(60)]
    plain = [machine.decode(StopRule(0), 30, seed)[0] for seed in range(60)]
    assert sum(plain) / sum(times) > 0.97
    assert known.probed > 0, "it still probes"


def test_experience_is_a_situation_s_own_and_goes_with_the_target() -> None:
    target, draft = pair("llama")
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        for rows in (1, 2, 2):
            target.generate(**prompts(rows), max_new_tokens=12, do_sample=False, num_assistant_tokens="auto")
    known = auto_length._histories.all_of(target)
    assert [situation[-1] for situation in known] == [1, 2]
    assert all(each.elapsed > 0.0 for each in known.values())


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_what_a_text_s_end_cuts_off_is_not_held_against_the_draft(kind: str, monkeypatch) -> None:
    """The target as its own draft is never rejected, however short the texts."""
    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    target, _ = pair("llama")
    settings = {**prompts(1), "do_sample": False, "num_assistant_tokens": "auto", "cache_implementation": kind}
    with hf_specdec.enable(target, assistant_model=target, generation_strategy="speculative"):
        for seed in range(12):
            target.generate(**settings | prompts(1, seed=seed), max_new_tokens=4)
    (known,) = auto_length._histories.all_of(target).values()
    known = known.prepared or known
    assert min(known.accepted.reach()[:4]) > 0.85


def test_prepared_rounds_have_an_experience_of_their_own(monkeypatch) -> None:
    """One call in each kind of rounds, with the same settings, teaches its own kind alone."""
    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    target, draft = pair("llama")
    settings = {**prompts(1), "max_new_tokens": 12, "do_sample": False, "num_assistant_tokens": "auto"}
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        target.generate(**settings)
        (known,) = auto_length._histories.all_of(target).values()
        elapsed = known.elapsed
        assert elapsed > 0.0 and known.prepared is None
        target.generate(**settings, cache_implementation="static")
        (known,) = auto_length._histories.all_of(target).values()
    assert known.elapsed == elapsed
    assert known.prepared is not None and known.prepared.elapsed > 0.0 and known.prepared.prepared is None


def test_prepared_lengths_are_few_and_none_is_made_that_cannot_pay() -> None:
    """A draft that never agrees has the length of the first round made, and plain rounds; probes make no other."""
    for machine, most, on_average in ((Machine(0.3, flat(0.0)), 2, 2.0), (Machine(0.1, flat(0.8)), 6, 5.3)):
        made = []
        for seed in range(20):
            rule = Preparing()
            _, rounds = machine.decode(rule, 400, seed)
            assert rule.made <= set(PREPARED_LENGTHS) and rounds[0].draft_steps == 1
            made.append(len(rule.made))
        assert max(made) <= most and sum(made) / len(made) <= on_average
    probes = [
        finished for finished in Machine(0.05, flat(0.0)).decode(Preparing(), 400, 0)[1][20:] if finished.draft_steps
    ]
    assert probes and {finished.draft_steps for finished in probes} == {1}


def test_a_length_that_is_not_ready_has_to_promise_more() -> None:
    rule = AutoLength()
    rates = [1.0] + [0.5] * MAX_ASSISTANT_TOKENS
    rates[2], rates[4], rates[8], rates[3] = 1.5, 1.6, 1.64, 2.0
    assert rule._best(rates) == 3
    for ready, best in (({0, 2}, 2), ({0, 4}, 4), ({0, 1}, 2), ({0, 2, 8}, 8)):
        rule.use_prepared(ready)
        assert rule._best(rates) == best


def test_a_much_longer_length_is_not_prepared_on_a_guess() -> None:
    """Narrow passes and the first lengths promise a lot of sixteen drafts, whose pass is no narrow one any more."""
    machine = Machine(0.12, flat(0.85), wider=0.05, narrow=10, beginning=1.0)
    fixed = [mean_time(machine, lambda n=n: StopRule(n), 400, 12, 100) for n in (1, 2, 4, 8, 16)]
    assert fixed[4] > 1.3 * min(fixed)
    made = [set[int]() for _ in range(20)]
    for seed, lengths in enumerate(made):
        rule = Preparing()
        machine.decode(rule, 400, seed)
        lengths |= rule.made
    assert all(lengths & {4, 8} for lengths in made)
    assert sum(16 in lengths for lengths in made) <= 5  # where luck at first is taken for acceptance
    assert min(fixed) / mean_time(machine, Preparing, 400, 20, 100) > 0.93


def test_later_prepared_calls_begin_with_the_length_that_paid_where_it_is_ready() -> None:
    known = LengthHistory()
    Machine(0.1, flat(0.9)).decode(Preparing(known), 400, 0)
    for ready, first in ((set(PREPARED_LENGTHS), {4, 8, 16}), (set(), {1})):
        rule = AutoLength(known)
        rule.use_prepared(ready)
        assert rule.limit in first


def test_prepared_drafts_take_all_steps_where_rows_stop() -> None:
    """Rows that stop after one of eight tokens shorten the general rounds only."""
    expected = {}
    for rule in (AutoLength(), Preparing()):
        for _ in range(50):
            rule.limit = 8
            steps = 2 if type(rule) is AutoLength else 8
            rule.observe(Round((1,), (1,), (2,), (0.0,), steps, steps + 1, 0.3 * steps, 1.0, 1.0 + 0.3 * steps))
        expected[type(rule)] = rule._rates()[8]
    assert expected[Preparing] < 0.6 * expected[AutoLength]


def test_a_catch_up_pass_is_a_probe_s_cost_and_no_step_s() -> None:
    """It costs as much for one token as for many, which nothing but a round that made one can tell."""
    times = PassTimes()
    times.add(Round((0,), (0,), (1,), (0.0,), 0, 1, 0.0, 1.0, 1.0), 0.0)
    assert times.catch_up(1.0) < 0.1
    for _ in range(3):
        times.add(Round((2,), (0,), (1,), (0.0,), 2, 3, 0.8, 1.0, 1.8, catch_up_seconds=0.6), 1.0)
    assert times.step() == pytest.approx(0.1)
    assert times.catch_up(1.0) == pytest.approx(0.6)
    assert times.catch_up(1000.0) > 0.6
    rule = AutoLength()
    rule.known.times = times
    rule._unread = 1.0
    assert rule._loss(1) > 0.7


def test_a_width_s_time_ages_where_passes_may_have_become_faster() -> None:
    """They do when they are recorded; what was known of a width before would keep it from being tried again."""
    estimates = {}
    for prepared in (False, True):
        times = PassTimes(prepared=prepared)
        for _ in range(5):
            times.add(Round((4,), (0,), (1,), (0.0,), 4, 5, 0.4, 1.6, 2.0), 0.0)
        for _ in range(100):
            times.add(Round((1,), (0,), (1,), (0.0,), 1, 2, 0.1, 1.0, 1.1), 0.0)
        estimates[prepared] = times.target(5)
    assert estimates[False] < 1.35 < 1.5 < estimates[True]


def test_a_batch_drafts_for_as_long_as_any_of_its_rows_does() -> None:
    """Half of the rows stop after one token: alone that shortens every second round, together none."""
    expected = {}
    for rows in (1, 8):
        rule = AutoLength()
        for number in range(200):
            drafted = tuple(1 if (number + row) % 2 else rule.limit for row in range(rows))
            steps, width = max(drafted), 1 + max(drafted)
            times = (0.3 * steps, 1.0, 1.0 + 0.3 * steps)
            rule.observe(Round(drafted, drafted, tuple(n + 1 for n in drafted), (0.0,) * rows, steps, width, *times))
        expected[rows] = rule._rates()[8]
    assert expected[8] < 0.9 * expected[1]


def test_rounds_without_times_are_learnt_from_as_far_as_they_go() -> None:
    """transformers' own loop passes no times on."""
    rule = AutoLength()
    for _ in range(20):
        n = rule.limit
        rule.observe(Round((n,), (n,), (n + 1,), (0.0,), n, n + 1, 0.0, 0.0, 0.0))
    assert rule.limit > 4


def test_a_position_borrows_from_the_one_before_until_it_is_seen() -> None:
    positions = PositionRates(0.5)
    for _ in range(50):
        positions.add(2, 4, 1.0)
    reach = positions.reach()
    assert reach[0] > 0.95 and reach[1] > 0.9 and reach[2] < 0.1
    assert len(reach) == MAX_ASSISTANT_TOKENS and all(a >= b for a, b in pairwise(reach))


def test_the_first_of_several_rules_to_stop_stops() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    all_three = FirstOf(StopRule(3), Fallback(16, 0.6), EntropyStop(16, 1.0))
    assert all_three.limit == 3 and all_three.reads_probabilities
    before, after = all_three.before_append(probs), all_three.after_append(probs)
    assert before is not None and before.tolist() == [False, True]
    assert after is not None and after.tolist() == [True, True]
    assert FirstOf(StopRule(3), Fallback(16, 0.6)).after_append(probs) is None
    auto = AutoLength()
    shared = FirstOf(auto, Fallback(16, 0.6))
    for _ in range(5):
        shared.observe(Round((shared.limit,), (shared.limit,), (shared.limit + 1,), (0.0,), 1, 2, 0.0, 0.0, 0.0))
        assert shared.limit == auto.limit > 0
    assert not FirstOf(StopRule(3), auto).reads_probabilities


def test_the_entropy_stop_goes_by_its_bound() -> None:
    """H = ln 2 gives 1 - sqrt(0.2 ln 2) = 0.6277; a certain token gives 1."""
    probs = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert [EntropyStop(4, t).after_append(probs).tolist() for t in (0.62, 0.63, 1.0)] == [
        [False, False],
        [True, False],
        [True, False],
    ]


def test_a_draft_that_is_never_sure_drafts_the_token_whose_pass_is_paid_for() -> None:
    target, draft = pair("llama")
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=4, entropy_threshold=1.0)
    target.generate(**prompts(2), max_new_tokens=12, do_sample=False, eos_token_id=None, custom_generate=decoding)
    assert decoding.stats is not None
    assert {(r.draft_steps, max(r.drafted)) for r in decoding.stats.rounds[:-1]} == {(1, 1)}


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "t5", "bart"])
def test_greedy_tokens_are_those_of_plain_generate_whatever_the_lengths(
    family: str, batch_size: int, monkeypatch
) -> None:
    """Rounds without drafts among rounds with many: the draft's cache catches up."""
    target, draft = pair(family)
    inputs = prompts(batch_size)
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    plain = target.generate(**inputs, **settings)
    lengths = cycle([3, 0, 0, 5, 1, 0, 0, 0, 16])
    monkeypatch.setattr(AutoLength, "_choose", lambda self: setattr(self, "limit", next(lengths)))
    variants = [
        {},
        {"entropy_threshold": 0.3},
        {"strategy": "bild", "rollback_threshold": 0.0},
        {"drafter": "lookup"},
        {"drafter": "hybrid"},
    ]
    for variant in variants:
        decoding = SpeculativeDecoding(draft, num_assistant_tokens="auto", **variant)
        assert torch.equal(target.generate(**inputs, **settings, custom_generate=decoding), plain)
        assert decoding.stats is not None
        if not variant:
            assert {0, 1, 3, 5} <= {n for r in decoding.stats.rounds for n in r.drafted}


def test_auto_and_entropy_are_arguments_of_generate() -> None:
    target, draft = pair("llama")
    inputs, settings = prompts(2), {"max_new_tokens": 12, "do_sample": False}
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative", entropy_threshold=0.4):
        output = target.generate(**inputs, **settings, num_assistant_tokens="auto")
    assert torch.equal(output, target.generate(**inputs, **settings))
    target.generation_config.num_assistant_tokens = "auto"
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        assert torch.equal(target.generate(**inputs, **settings), output)
    stats = hf_specdec.last_speculation(target)
    assert stats is not None and stats.rounds[0].drafted == (1, 1)
